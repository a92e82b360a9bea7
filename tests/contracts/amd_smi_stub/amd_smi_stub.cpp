// A libamd_smi.so without hardware: the functions wattune calls, with the structures of amdsmi.h, scripted. ROCM is the
// release whose structures they are: 7 (library 26) or 6, which stands for 6.4 (library 25). Every other symbol the Python wrapper binds at import comes from others.inc, which the test writes from the
// installed wrapper, and says NOT_SUPPORTED.
//
// AMDSMI_STUB_PROFILE: mi250 (two packages of two dies; power at the first of each) or mi300 (two devices).
// AMDSMI_STUB_MAJOR: another first number of the library's version to claim.
// AMDSMI_STUB_STATE: a file that keeps the settings of the dies, as a driver does for all processes; every setting is
// appended to AMDSMI_STUB_STATE.log (process, die, what, value). Without it a process has its own. AMDSMI_STUB_DENIED:
// set where this user may set nothing. AMDSMI_STUB_DELAY_US: time that a setting takes, after the die has it.
// Time is the machine's until stub_advance_ns is called; from then on only that moves it.

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>

namespace {

constexpr uint32_t kSuccess = 0, kInvalid = 1, kNotSupported = 2, kNoPermission = 10;
constexpr double kJoulePerCount = 1.0 / 65536;  // 15.259 uJ, kgd_pp_interface.h

#if ROCM < 7
constexpr int kJpegEngines = 32;
struct Version { uint32_t year, major, minor, release; const char* build; };
constexpr Version kVersion = {25, 0, 2, 0, "stub"};
#else
constexpr int kJpegEngines = 40;
struct Version { uint32_t major, minor, release; const char* build; };
constexpr Version kVersion = {26, 0, 2, "stub"};
#endif
struct Bdf { uint64_t function : 3, device : 5, bus : 8, domain : 48; };
struct PowerCap { uint64_t power_cap, default_power_cap, dpm_cap, min_power_cap, max_power_cap, reserved[3]; };
struct Clock { uint32_t clk, min_clk, max_clk; uint8_t clk_locked, clk_deep_sleep; uint32_t reserved[4]; };
struct Presets { uint64_t available, current; uint32_t count; };
struct Driver { char version[256], date[256], name[256]; };
struct Enumeration { uint32_t drm_render, drm_card, hsa_id, hip_id; char hip_uuid[256]; };
struct Asic {
  char market_name[256]; uint32_t vendor_id; char vendor_name[256]; uint32_t subvendor_id; uint64_t device_id;
  uint32_t rev_id; char asic_serial[256]; uint32_t oam_id, num_of_compute_units; uint64_t target_graphics_version;
  uint32_t subsystem_id, reserved[21];
};
struct Process {
  char name[256]; uint32_t pid; uint64_t mem;
  struct { uint64_t gfx, enc; uint32_t reserved[12]; } engine_usage;
  struct { uint64_t gtt_mem, cpu_mem, vram_mem; uint32_t reserved[10]; } memory_usage;
  char container_name[256]; uint32_t cu_occupancy, reserved[11];
};
struct Partition {
  uint32_t gfx_busy_inst[8]; uint16_t jpeg_busy[kJpegEngines], vcn_busy[4];
  uint64_t gfx_busy_acc[8], below_host_limit_acc[8];
#if ROCM >= 7
  uint64_t below_host_limit_ppt_acc[8], below_host_limit_thm_acc[8], low_utilization_acc[8],
      below_host_limit_total_acc[8];
#endif
};
struct Metrics {
  uint16_t structure_size; uint8_t format_revision, content_revision;
  uint16_t temperature_edge, temperature_hotspot, temperature_mem, temperature_vrgfx, temperature_vrsoc,
      temperature_vrmem, average_gfx_activity, average_umc_activity, average_mm_activity, average_socket_power;
  uint64_t energy_accumulator, system_clock_counter;
  uint16_t average_gfxclk, average_socclk, average_uclk, average_vclk0, average_dclk0, average_vclk1, average_dclk1,
      current_gfxclk, current_socclk, current_uclk, current_vclk0, current_dclk0, current_vclk1, current_dclk1;
  uint32_t throttle_status;
  uint16_t current_fan_speed, pcie_link_width, pcie_link_speed;
  uint32_t gfx_activity_acc, mem_activity_acc;
  uint16_t temperature_hbm[4];
  uint64_t firmware_timestamp;
  uint16_t voltage_soc, voltage_gfx, voltage_mem;
  uint64_t indep_throttle_status;
  uint16_t current_socket_power, vcn_activity[4];
  uint32_t gfxclk_lock_status;
  uint16_t xgmi_link_width, xgmi_link_speed;
  uint64_t pcie_bandwidth_acc, pcie_bandwidth_inst, pcie_l0_to_recov_count_acc, pcie_replay_count_acc,
      pcie_replay_rover_count_acc, xgmi_read_data_acc[8], xgmi_write_data_acc[8];
  uint16_t current_gfxclks[8], current_socclks[4], current_vclk0s[4], current_dclk0s[4], jpeg_activity[32];
  uint32_t pcie_nak_sent_count_acc, pcie_nak_rcvd_count_acc;
  uint64_t accumulation_counter, prochot_residency_acc, ppt_residency_acc, socket_thm_residency_acc,
      vr_thm_residency_acc, hbm_thm_residency_acc;
  uint16_t num_partition;
  Partition xcp_stats[8];
  uint32_t pcie_lc_perf_other_end_recovery;
  uint64_t vram_max_bandwidth;
  uint16_t xgmi_link_status[8];
};

struct Die {
  uint32_t bus, hip_id, package;
  bool primary;
  uint64_t throttle_status = 0;
  uint32_t failure = kSuccess;
};

// The library's order is that of bus addresses, HIP's is not.
Die kMi250[] = {{0xc1, 2, 0, true}, {0xc6, 3, 0, false}, {0xc9, 0, 1, true}, {0xce, 1, 1, false}};
Die kMi300[] = {{0x05, 1, 0, true}, {0x26, 0, 1, true}};

const char* env(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value ? value : otherwise;
}
const bool kIsMi300 = std::strcmp(env("AMDSMI_STUB_PROFILE", "mi250"), "mi300") == 0;
Die* const kDies = kIsMi300 ? kMi300 : kMi250;
const uint32_t kNumDies = kIsMi300 ? 2 : 4;

struct Setting { uint64_t cap_uw, profile; uint32_t least_mhz, most_mhz, level, unused; };
constexpr uint64_t kProfiles = 4 | 8 | 64;  // power_saving, compute, bootup_default
const uint64_t kMostUw = kIsMi300 ? 750000000 : 560000000;
const uint32_t kMostMhz = kIsMi300 ? 2100 : 1700;
Setting g_own[4] = {};
Setting* g_settings = g_own;

uint32_t open_settings() {
  if (const char* path = std::getenv("AMDSMI_STUB_STATE")) {
    const int fd = open(path, O_RDWR);  // made by the test, with what is found
    void* at = fd < 0 ? MAP_FAILED : mmap(nullptr, sizeof(g_own), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd >= 0) close(fd);
    if (at == MAP_FAILED) return kInvalid;
    g_settings = static_cast<Setting*>(at);
  } else if (!g_own[0].most_mhz) {
    for (Setting& own : g_own) own = {kMostUw, 64, 0, kMostMhz, 0, 0};
  }
  return kSuccess;
}

uint64_t g_calls = 0;
bool g_scripted = false;
uint64_t g_now_ns = 0;
double g_power_w[2] = {400, 500}, g_energy_j[2] = {1000, 2000};
double g_capped_frac = 0.25;  // of the time at the package power limit
double g_cycles = 0, g_capped_cycles = 0;
double g_link_kib = 0;

void advance(uint64_t elapsed_ns) {
  const double elapsed_s = elapsed_ns * 1e-9;
  for (int package = 0; package < 2; ++package) g_energy_j[package] += g_power_w[package] * elapsed_s;
  g_cycles += elapsed_s * 1000;  // the firmware's loop, 1 kHz
  g_capped_cycles += elapsed_s * 1000 * g_capped_frac;
  g_link_kib += elapsed_s * 1e6;
  g_now_ns += elapsed_ns;
}

void follow_clock() {
  if (g_scripted) return;
  timespec now;
  clock_gettime(CLOCK_BOOTTIME, &now);
  const uint64_t now_ns = uint64_t(now.tv_sec) * 1000000000 + uint64_t(now.tv_nsec);
  if (g_now_ns == 0) g_now_ns = now_ns;
  advance(now_ns - g_now_ns);
}

Die* die_of(void* handle) { return static_cast<Die*>(handle); }
Setting& setting_of(void* handle) { return g_settings[die_of(handle) - kDies]; }

uint32_t may_set(void* handle, const char* what, uint64_t value) {
  if (std::getenv("AMDSMI_STUB_DENIED")) return kNoPermission;
  if (g_settings == g_own) return kSuccess;
  char path[4096], line[128];
  std::snprintf(path, sizeof(path), "%s.log", std::getenv("AMDSMI_STUB_STATE"));
  const int length = std::snprintf(line, sizeof(line), "%d %d %s %llu\n", getpid(), int(die_of(handle) - kDies), what,
                                   static_cast<unsigned long long>(value));
  const int fd = open(path, O_WRONLY | O_APPEND | O_CREAT, 0666);
  const bool written = fd >= 0 && write(fd, line, size_t(length)) == length;
  if (fd >= 0) close(fd);
  return written ? kSuccess : kInvalid;
}

uint32_t set_done() {
  if (const char* delay = std::getenv("AMDSMI_STUB_DELAY_US")) usleep(useconds_t(std::atoi(delay)));
  return kSuccess;
}

void fill_mi250(const Die& die, Metrics* out) {
  out->format_revision = 1, out->content_revision = 3;
  out->temperature_edge = 41, out->temperature_hotspot = 50 + die.hip_id, out->temperature_mem = 60 + die.hip_id;
  out->average_gfx_activity = 97, out->average_umc_activity = 35;
  out->average_socket_power = die.primary ? uint16_t(g_power_w[die.package]) : 0;
  out->energy_accumulator = die.primary ? uint64_t(g_energy_j[die.package] / kJoulePerCount) : 0;
  out->current_gfxclk = 1500 + die.hip_id, out->average_gfxclk = 1400;
  out->throttle_status = uint32_t(die.throttle_status != 0), out->indep_throttle_status = die.throttle_status;
  for (auto& temperature : out->temperature_hbm) temperature = 58;
}

void fill_mi300(const Die& die, Metrics* out) {
  out->format_revision = 1, out->content_revision = 6;
  out->temperature_hotspot = 70 + die.hip_id, out->temperature_mem = 55;
  out->average_gfx_activity = 99, out->average_umc_activity = 50;
  out->current_socket_power = uint16_t(g_power_w[die.package]);
  out->energy_accumulator = uint64_t(g_energy_j[die.package] / kJoulePerCount);
  for (int xcd = 0; xcd < 8; ++xcd) out->current_gfxclks[xcd] = uint16_t(2000 + 10 * xcd);
  for (int link = 0; link < 7; ++link) {
    out->xgmi_read_data_acc[link] = uint64_t(g_link_kib);
    out->xgmi_write_data_acc[link] = uint64_t(2 * g_link_kib);
  }
  out->accumulation_counter = uint64_t(g_cycles), out->ppt_residency_acc = uint64_t(g_capped_cycles);
  out->socket_thm_residency_acc = 7, out->vr_thm_residency_acc = 0, out->hbm_thm_residency_acc = 0;
  out->prochot_residency_acc = 0;
}

}  // namespace

extern "C" {

// What tests do with it.
void stub_advance_ns(uint64_t elapsed_ns) { g_scripted = true, advance(elapsed_ns); }
void stub_set_power_w(uint32_t package, double power_w) { g_power_w[package] = power_w; }
void stub_set_throttle(uint32_t die, uint64_t status) { kDies[die].throttle_status = status; }
void stub_set_failure(uint32_t die, uint32_t status) { kDies[die].failure = status; }
uint64_t stub_metrics_calls() { return g_calls; }
uint64_t stub_sizeof(const char* name) {
  const struct { const char* name; uint64_t size; } sizes[] = {
      {"amdsmi_version_t", sizeof(Version)}, {"amdsmi_bdf_t", sizeof(Bdf)}, {"amdsmi_clk_info_t", sizeof(Clock)},
      {"amdsmi_power_cap_info_t", sizeof(PowerCap)}, {"amdsmi_driver_info_t", sizeof(Driver)},
      {"amdsmi_enumeration_info_t", sizeof(Enumeration)}, {"amdsmi_asic_info_t", sizeof(Asic)},
      {"amdsmi_proc_info_t", sizeof(Process)}, {"amdsmi_gpu_metrics_t", sizeof(Metrics)}};
  for (const auto& each : sizes)
    if (std::strcmp(each.name, name) == 0) return each.size;
  return 0;
}

uint32_t amdsmi_init(uint64_t) { return open_settings(); }
uint32_t amdsmi_shut_down() { return kSuccess; }

uint32_t amdsmi_get_lib_version(Version* out) {
  *out = kVersion;
  if (const char* major = std::getenv("AMDSMI_STUB_MAJOR")) *reinterpret_cast<uint32_t*>(out) = uint32_t(std::atoi(major));
  return kSuccess;
}

// A die is a socket of its own, as its bus address is.
uint32_t amdsmi_get_socket_handles(uint32_t* count, void** out) {
  for (uint32_t index = 0; out && index < kNumDies; ++index) out[index] = &kDies[index];
  *count = kNumDies;
  return kSuccess;
}
uint32_t amdsmi_get_processor_handles(void* socket, uint32_t* count, void** out) {
  if (out) out[0] = socket;
  *count = 1;
  return kSuccess;
}

uint32_t amdsmi_get_gpu_device_bdf(void* handle, Bdf* out) {
  *out = {0, 0, die_of(handle)->bus, 0};
  return kSuccess;
}
uint32_t amdsmi_get_gpu_device_uuid(void* handle, uint32_t* length, char* out) {
  if (*length < 38) return kInvalid;
  std::strcpy(out, "00ff740c-0000-1000-80ff-0123456789a0");
  out[35] = char('0' + die_of(handle)->hip_id);
  return kSuccess;
}
uint32_t amdsmi_get_gpu_asic_info(void*, Asic* out) {
  std::memset(out, 0, sizeof(*out));
  std::strcpy(out->market_name, kIsMi300 ? "AMD Instinct MI300X" : "AMD Instinct MI250");
  std::strcpy(out->vendor_name, "Advanced Micro Devices, Inc."), std::strcpy(out->asic_serial, "0123456789abcdef");
  out->vendor_id = 0x1002, out->device_id = kIsMi300 ? 0x74a1 : 0x740c;
  return kSuccess;
}
uint32_t amdsmi_get_gpu_driver_info(void*, Driver* out) {
  std::memset(out, 0, sizeof(*out));
  std::strcpy(out->version, "6.14.14"), std::strcpy(out->name, "amdgpu");
  return kSuccess;
}
uint32_t amdsmi_get_gpu_enumeration_info(void* handle, Enumeration* out) {
  std::memset(out, 0, sizeof(*out));
  out->hip_id = die_of(handle)->hip_id;
  return kSuccess;
}
uint32_t amdsmi_get_power_cap_info(void* handle, uint32_t sensor, PowerCap* out) {
  if (sensor) return kInvalid;
  std::memset(out, 0, sizeof(*out));
  if (!die_of(handle)->primary) return kSuccess;
  out->power_cap = setting_of(handle).cap_uw, out->max_power_cap = kMostUw;
  return kSuccess;
}
uint32_t amdsmi_set_power_cap(void* handle, uint32_t sensor, uint64_t cap_uw) {
  if (const uint32_t refused = may_set(handle, "power", cap_uw)) return refused;
  if (sensor || !die_of(handle)->primary || cap_uw > kMostUw) return kInvalid;
  setting_of(handle).cap_uw = cap_uw;
  return set_done();
}
uint32_t amdsmi_get_clock_info(void* handle, uint32_t, Clock* out) {
  std::memset(out, 0, sizeof(*out));
  out->min_clk = setting_of(handle).least_mhz, out->max_clk = setting_of(handle).most_mhz;
  return kSuccess;
}
uint32_t amdsmi_set_gpu_clk_range(void* handle, uint64_t least_mhz, uint64_t most_mhz, uint32_t type) {
  if (const uint32_t refused = may_set(handle, "clock", most_mhz)) return refused;
  if (type || least_mhz > most_mhz || most_mhz > kMostMhz) return kInvalid;
  setting_of(handle).least_mhz = uint32_t(least_mhz), setting_of(handle).most_mhz = uint32_t(most_mhz);
  setting_of(handle).level = 3;  // as the driver does: manual
  return set_done();
}
uint32_t amdsmi_get_gpu_perf_level(void* handle, uint32_t* out) { return *out = setting_of(handle).level, kSuccess; }
uint32_t amdsmi_set_gpu_perf_level(void* handle, uint32_t level) {
  if (const uint32_t refused = may_set(handle, "level", level)) return refused;
  setting_of(handle).level = level;
  return set_done();
}
uint32_t amdsmi_get_gpu_power_profile_presets(void* handle, uint32_t, Presets* out) {
  *out = {kProfiles, setting_of(handle).profile, 3};
  return kSuccess;
}
uint32_t amdsmi_set_gpu_power_profile(void* handle, uint32_t, uint64_t profile) {
  if (const uint32_t refused = may_set(handle, "profile", profile)) return refused;
  if (!(profile & kProfiles)) return kInvalid;
  setting_of(handle).profile = profile;
  return set_done();
}
uint32_t amdsmi_get_gpu_memory_usage(void*, uint32_t kind, uint64_t* out) {
  if (kind) return kInvalid;  // 0 is video memory
  *out = 3ull << 30;
  return kSuccess;
}
uint32_t amdsmi_get_gpu_process_list(void*, uint32_t* count, Process* out) {
  std::memset(out, 0, sizeof(*out));
  std::strcpy(out->name, "train"), out->pid = 4242, out->memory_usage.vram_mem = 2ull << 30;
  *count = 1;
  return kSuccess;
}

uint32_t amdsmi_get_gpu_metrics_info(void* handle, Metrics* out) {
  const Die& die = *die_of(handle);
  ++g_calls;
  if (die.failure) return die.failure;
  follow_clock();
  std::memset(out, 0xff, sizeof(*out));  // what a product lacks has all bits set
  out->structure_size = sizeof(*out), out->system_clock_counter = g_now_ns;
  kIsMi300 ? fill_mi300(die, out) : fill_mi250(die, out);
  return kSuccess;
}

#define NOT_SUPPORTED(name) \
  uint32_t name() { return kNotSupported; }
#include "others.inc"

}  // extern "C"
