"""The cause that a program's last words name: memory, its plan, the machine, or what surrounds every plan.

The words are those of public reports; each end of `tests/fixtures/ends` has its source. The numbers of Xids are those
whose first remedy is to reset, restart or check the machine, or that are errors of its memory or links; others may be
the program's: https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html.
"""

import re
from typing import Final, NamedTuple

from wattune.run import Cause, RunStatus


class Kind(NamedTuple):
    """A kind of end."""

    status: RunStatus
    cause: Cause | None = None
    """The part of the cluster that failed it."""
    words: str = ""
    """Beginning of the reason."""


PLAN: Final = Kind(RunStatus.CRASHED)
DEVICE_MEMORY: Final = Kind(RunStatus.OUT_OF_MEMORY)
HOST_MEMORY: Final = Kind(RunStatus.OUT_OF_MEMORY, None, "the host's memory ran out: ")
DEVICE: Final = Kind(RunStatus.INFRA_FAILED, Cause.DEVICE, "a device failed: ")
NETWORK: Final = Kind(RunStatus.INFRA_FAILED, Cause.NETWORK, "ranks lost each other: ")
"""Also what the other ranks of one that failed say: it decides only where no rank says anything else."""
KILLED: Final = Kind(RunStatus.INFRA_FAILED, Cause.WORKER_KILLED, "killed from outside: ")
SURROUNDINGS: Final = Kind(RunStatus.INFRA_FAILED, Cause.SURROUNDINGS, "any plan would meet this: ")

_OWN: Final = re.compile(
    r"(?:\w+\.)*(?:Assertion|Value|Type|Key|Index|Attribute|Name|UnboundLocal|ZeroDivision|NotImplemented|Recursion"
    r"|Argument|Validation|Syntax|Config\w*|Misconfiguration)(?:Error|Exception)\b"
)
"""Exceptions that a program raises about itself, whatever their message says of memory or machines."""


def _kinds(text: str) -> list[tuple[Kind, re.Pattern[str]]]:
    """Reads lines with the name of a kind and its words; the first that are found count."""
    rows = (line.split(maxsplit=1) for line in text.strip().splitlines())
    return [(_NAMED[name], re.compile(words)) for name, words in rows]


_NAMED: Final = {
    "plan": PLAN,
    "memory": DEVICE_MEMORY,
    "host": HOST_MEMORY,
    "device": DEVICE,
    "network": NETWORK,
    "killed": KILLED,
    "around": SURROUNDINGS,
}

_ALWAYS: Final = _kinds(r"""
    around  No module named|cannot import name|undefined symbol|cannot open shared object file
    around  `?(?:GLIBC|CXXABI)\w*_\d|NVIDIA driver on your system|driver version is insufficient
    around  no kernel image is available|NoBinaryForGpu|invalid device function|ERROR_INVALID_ISA
    around  not compiled with (?:CUDA|ROCm|NCCL)|CUDA_HOME|Ninja is required
    around  [Ee]rror (?:building|compiling) (?:extension|objects)|compiled with different CUDA
    around  used to compile PyTorch|(?:Version|ContextualVersion)Conflict|Failed to import \S+ because
    around  insufficient shared memory|pip install|operator \S+::\S+ does not exist|installed version
    around  can't start new thread|items of ancdata
    around  requires? (?:torch|transformers|accelerate|deepspeed|triton|CUDA|[Pp]ython)\b.*\d
    around  out of shared memory(?! \()|shared memory object|signal: Bus error|ibv_\w+\b.*Cannot allocate memory
    around  No space left on device|[Dd]isk quota exceeded|Read-only file system|Too many open files
    around  Stale file handle|disk is full|readonly database|does not recognize this architecture|\[Errno 5\]
    around  [Aa]ddress already in use|EADDRINUSE|already exists and is not empty|PytorchStreamReader failed
    around  deserializing header|(?:/\S+|\.\w{2,5}['"]?) (?:does not exist|not found)
    around  \b40[13]\b.*(?:[Cc]lient|Forbidden|Unauthorized)|gated repo|Repository ?Not ?Found
    around  valid model identifier|couldn't connect to|[Cc]ouldn't reach|[Oo]ffline ?[Mm]ode|outgoing traffic
    around  LocalEntryNotFound|Max retries exceeded|HTTPS?ConnectionPool|name resolution|Name or service not known
    around  CERTIFICATE_VERIFY|DatasetNotFound|does not appear to have a file named
    around  [Ll]icen[cs]e .*(?:expired|invalid|fail|not (?:found|valid)|denied)|api[_ ]?key|AuthenticationError
    around  NoCredentials|AccessDenied|[Ii]nvalid (?:user )?token|huggingface-cli login
    memory  No available memory for the cache blocks
""")
"""Words that no program says of a plan, whatever the class of the exception."""

_ELSE: Final = _kinds(r"""
    host    running low on memory|DefaultCPUAllocator|_ArrayMemoryError
    plan    [Ii]nvalid ?[Uu]sage|Duplicate GPU|larger than max|out of resource
    memory  RESOURCE_EXHAUSTED|ResourceExhausted|OutOfMemoryError|ERROR_OUT_OF_(?:MEMORY|RESOURCES)
    memory  hipErrorOutOfMemory|cudaErrorMemoryAllocation|STATUS_\w*ALLOC_FAILED|AllocFailed|OOM when allocating
    memory  executable batch size found|[Ff]ailed to (?:CUDA|HIP|cuda|hip) [cm]alloc
    memory  (?:CUDA|HIP|ROCm|XPU|MPS|NPU|GPU)\w*(?: backend)? out of memory
    memory  (?:error|failure|failed)\W{1,3}(?:\d+ )?'?out of memory
    host    MemoryError\b|(?:can't|[Cc]annot) allocate memory|bad_alloc|not enough memory: you tried|oom.kill
    host    OOM.Killed|task\w* [\d,-]+: Out Of Memory|[Ee]xceeded (?:step|job) memory|Out of memory: Killed
    host    Unable to allocate [\d.]+ [KMGTP]iB|(?:HostAlloc|[Hh]ost [cm]alloc|pinned)\b.*(?:fail|memory)
    host    DataLoader worker .*signal: Killed|[Ff]ailed to (?:CUDA|HIP|cuda|hip) host [cm]alloc|[Oo]ut of memory
    device  \bECC\b|NVLink error|NVLINK_UNCORRECTABLE|ECC_?(?:UN|NOT)\w+|off the bus|(?:GPU|[Dd]evice) (?:is )?lost
    device  (?<!S)Xid(?: \([^)]*\))?\W+(?:4[68]|54|6[24]|7[49]|9[45]|119|120|136|14[03-9]|15[068]|167|17[12])\b|GPU Hang
    device  (?:error|failure|UDA)\W{1,3}(?:\d+ )?'?unknown error|hipErrorUnknown|busy or unavailable
    device  device handle|no (?:CUDA|ROCm)-capable device|No (?:CUDA |HIP )?GPUs are available
    device  system not yet initialized|ERROR_NO_DEVICE|[Hh]ardware [Ee]rror|launch timed out
    killed  CANCELLED AT|NODE_FAIL|[Nn]ode failure|[Pp]reempted|got signal: (?:1|2|9|15)\b|[Rr]eceived SIGTERM
    killed  SIGTERM received|KeyboardInterrupt|signal: Terminated
    network [NR]CCL\b|nccl\w*Error|DistBackend|DistNetwork|DistStore|collective operation timeout|watchdog
    network Rendezvous|[Cc]onnection (?:was )?(?:likely )?(?:closed|reset|refused|aborted|timed out)
    network Connection\w*Error|[Bb]roken ?[Pp]ipe|[Ss]ocket (?:closed|timeout|Timeout)|socket has timed out
    network recvVector|got 0 bytes|gloo/transport|connectFullMesh|exception on one of the ranks|pair closure|ibv_
    network NET/IB|[Tt]imed out (?:waiting|after)|\bUNAVAILABLE\b|DEADLINE_EXCEEDED|coordination service
    network No route to host|lost communication|(?:[Nn]etwork|[Hh]ost) is unreachable
    around  (?:ModuleNotFound|Import|FileNotFound|Permission|NotADirectory|PackageNotFound)Error
    around  [Pp]ermission denied|No such file or directory|command not found|\[Errno 1\]
    around  (?:[Cc]ould(?:n't| not)|[Uu]nable to) find '?/
    around  [Dd]ata ?set .*(?:not found|does not exist|doesn't exist|missing)
""")
_INNER: Final = re.compile(r"terminated with exception:\s*(?:\[[^\]]*\]\s*)?(?P<said>.+)")
"""A watchdog's words of another error, which counts."""


_ADVICE: Final = re.compile(
    r"\b(?:avoid|prevent|risk|cause|runs?|running|would|may|might|could|otherwise)\b[^.;:\n]{0,40}?out of memory",
    re.IGNORECASE,
)
"""Memory that may run out, and has not."""


def kind_of(words: str) -> Kind:
    """Returns the kind of end that an exception, or another last line, names."""
    inner = _INNER.search(words)
    text = _ADVICE.sub("", inner["said"] if inner else words)
    kinds = _ALWAYS if _OWN.match(text) else [*_ALWAYS, *_ELSE]
    return next((kind for kind, pattern in kinds if pattern.search(text)), PLAN)
