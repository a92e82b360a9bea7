// A libnvidia-ml.so.1 without hardware, with NVML's real ABI: four devices whose settings live in a file that all
// processes share, as a driver keeps them. Built by benchmarks/limit_deaths.py and tests/contracts/test_limits.py:
//
//     g++ -O1 -shared -fPIC -Wl,-soname,libnvidia-ml.so.1 -o libnvidia-ml.so.1 limit_stub.cpp
//
// LIMIT_STUB_STATE: the file. LIMIT_STUB_DENIED: set where this user may set nothing. LIMIT_STUB_DELAY_US: time that a
// setting takes, after the device has it. LIMIT_STUB_STUCK: a file with the number of a device
// that refuses whatever is set; it may come and go.
// Every setting is appended to LIMIT_STUB_STATE.log: process, device, what, value.

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

enum Status { kSuccess = 0, kInvalid = 2, kNotSupported = 3, kNoPermission = 4, kTooSmall = 7, kUnknown = 999 };
constexpr unsigned kDevices = 4, kLeast = 200000, kMost = 700000, kProfiles = 8;

struct Device { unsigned limit_mw, lock_least, lock_most, profiles[8]; };
struct Mask { unsigned words[kProfiles]; };
struct Current { unsigned version; Mask can, requested, enforced; };
struct Info { unsigned version; Mask profiles; struct { unsigned version, id, priority; Mask conflicting; } each[255]; };
struct Update { unsigned operation; Mask profiles; };
static_assert(sizeof(Current) == 0x64 && sizeof(Info) == 0x2bf8 && sizeof(Update) == 0x24, "as nvml.h 13");

Device* g_devices = nullptr;

bool open_state() {
  const char* path = std::getenv("LIMIT_STUB_STATE");
  const int fd = path ? open(path, O_RDWR) : -1;  // made by the test, with what is found
  if (fd < 0) return false;
  void* at = mmap(nullptr, kDevices * sizeof(Device), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (at == MAP_FAILED) return false;
  g_devices = static_cast<Device*>(at);
  return true;
}

unsigned index_of(void* handle) { return unsigned(static_cast<Device*>(handle) - g_devices); }

int may_set(void* handle, const char* what, long value) {
  if (std::getenv("LIMIT_STUB_DENIED")) return kNoPermission;
  if (const char* stuck = std::getenv("LIMIT_STUB_STUCK")) {
    unsigned which = kDevices;
    if (std::FILE* file = std::fopen(stuck, "r")) {
      if (std::fscanf(file, "%u", &which) != 1) which = kDevices;
      std::fclose(file);
    }
    if (which == index_of(handle)) return kUnknown;
  }
  char path[4096], line[128];
  std::snprintf(path, sizeof(path), "%s.log", std::getenv("LIMIT_STUB_STATE"));
  const int length = std::snprintf(line, sizeof(line), "%d %u %s %ld\n", getpid(), index_of(handle), what, value);
  const int fd = open(path, O_WRONLY | O_APPEND | O_CREAT, 0666);
  const bool written = fd >= 0 && write(fd, line, size_t(length)) == length;
  if (fd >= 0) close(fd);
  return written ? kSuccess : kUnknown;
}

int done() {
  if (const char* delay = std::getenv("LIMIT_STUB_DELAY_US")) usleep(useconds_t(std::atoi(delay)));
  return kSuccess;
}

}  // namespace

extern "C" {

int nvmlInitWithFlags(unsigned) { return open_state() ? kSuccess : kUnknown; }
int nvmlShutdown() { return kSuccess; }
const char* nvmlErrorString(int status) {
  return status == kNoPermission ? "Insufficient Permissions" : status == kNotSupported ? "Not Supported" : "Error";
}
int nvmlSystemGetDriverVersion(char* out, unsigned) { return std::strcpy(out, "580.0"), kSuccess; }
int nvmlSystemGetNVMLVersion(char* out, unsigned) { return std::strcpy(out, "13.580"), kSuccess; }
int nvmlDeviceGetCount_v2(unsigned* out) { return *out = kDevices, kSuccess; }
int nvmlDeviceGetHandleByIndex_v2(unsigned at, void** out) {
  if (at >= kDevices) return kInvalid;
  *out = g_devices + at;
  return kSuccess;
}
int nvmlDeviceGetUUID(void* device, char* out, unsigned) {
  return std::sprintf(out, "GPU-5tub0000-0000-0000-0000-00000000000%u", index_of(device)), kSuccess;
}
int nvmlDeviceGetName(void*, char* out, unsigned) { return std::strcpy(out, "NVIDIA H200"), kSuccess; }

int nvmlDeviceGetPowerManagementLimitConstraints(void*, unsigned* least, unsigned* most) {
  return *least = kLeast, *most = kMost, kSuccess;
}
int nvmlDeviceGetPowerManagementLimit(void* device, unsigned* out) {
  return *out = static_cast<Device*>(device)->limit_mw, kSuccess;
}
int nvmlDeviceGetEnforcedPowerLimit(void* device, unsigned* out) { return nvmlDeviceGetPowerManagementLimit(device, out); }
int nvmlDeviceSetPowerManagementLimit(void* device, unsigned mw) {
  if (const int refused = may_set(device, "power", mw)) return refused;
  if (mw < kLeast || mw > kMost) return kInvalid;
  static_cast<Device*>(device)->limit_mw = mw;
  return done();
}

int nvmlDeviceGetSupportedMemoryClocks(void*, unsigned* count, unsigned* out) {
  const bool fits = out && *count >= 1;
  *count = 1;
  if (!fits) return kTooSmall;
  return out[0] = 3201, kSuccess;
}
int nvmlDeviceGetSupportedGraphicsClocks(void*, unsigned memory_mhz, unsigned* count, unsigned* out) {
  if (memory_mhz != 3201) return kInvalid;
  const unsigned listed = (1980 - 345) / 15 + 1;
  const bool fits = out && *count >= listed;
  *count = listed;
  if (!fits) return kTooSmall;
  for (unsigned at = 0; at < listed; ++at) out[at] = 1980 - 15 * at;
  return kSuccess;
}
int nvmlDeviceSetGpuLockedClocks(void* device, unsigned least, unsigned most) {
  if (const int refused = may_set(device, "clock", long(most))) return refused;
  if (least > most || most < 345 || most > 1980) return kInvalid;
  static_cast<Device*>(device)->lock_least = least, static_cast<Device*>(device)->lock_most = most;
  return done();
}
int nvmlDeviceResetGpuLockedClocks(void* device) {
  if (const int refused = may_set(device, "clock", 0)) return refused;
  static_cast<Device*>(device)->lock_least = static_cast<Device*>(device)->lock_most = 0;
  return done();
}

int nvmlDeviceWorkloadPowerProfileGetProfilesInfo(void*, Info* out) {
  if (out->version != 0x1002bf8) return kInvalid;
  return out->profiles.words[0] = 0xf3, kSuccess;  // max_p, max_q, network, balanced, llm_inference, llm_training
}
int nvmlDeviceWorkloadPowerProfileGetCurrentProfiles(void* device, Current* out) {
  if (out->version != 0x1000064) return kInvalid;
  std::memcpy(out->requested.words, static_cast<Device*>(device)->profiles, sizeof(Mask));
  out->enforced = out->requested;
  return kSuccess;
}
int nvmlDeviceWorkloadPowerProfileUpdateProfiles_v1(void* device, Update* asked) {
  if (const int refused = may_set(device, "profile", asked->profiles.words[0])) return refused;
  if (asked->operation != 2) return kInvalid;
  std::memcpy(static_cast<Device*>(device)->profiles, asked->profiles.words, sizeof(Mask));
  return done();
}

}  // extern "C"
