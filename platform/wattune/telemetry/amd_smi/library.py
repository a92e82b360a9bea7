"""AMD SMI's Python package: loaded in silence, checked against the library it found, called below its conversions.

The package's own `amdsmi_get_gpu_metrics_info` turns the throttle bits into true or false, and its conversions cost
0.3 ms a call (7.0.2, measured against a stub). Metrics therefore come from the same C function through the package's
own declarations of it, in 2 us. Its other functions are called as they are.
"""

import contextlib
import ctypes
import importlib
import io
import sys
import threading
from collections.abc import Mapping
from typing import Any, Final

from wattune.errors import TelemetryError

NOT_AVAILABLE: Final = "N/A"
"""The code of a value the device does not give: all bits of the field are set (amdsmi.h)."""

_GENERATIONS: Final = {(6, 4): 25, (7, 0): 26, (7, 1): 26, (7, 2): 26}
"""ROCm release to the first number of its library's version (amdsmi.h: it changes with the ABI). Wrappers AMD installs
carry that number themselves, those of the Python package index ROCm's."""
_OWN_NUMBERING_FROM: Final = 20
"""Versions from here on are the library's own numbers: it began with years, ROCm counts from 1."""


def load_package() -> Any:
    """Imports `amdsmi`, whatever it prints kept from standard output.

    Only a sampler process may call this: a broken `amdsmi` breaks `import ray` too. Raises `TelemetryError`: it is not
    installed, or cannot load its library.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            return importlib.import_module("amdsmi")
    except ModuleNotFoundError as error:
        raise TelemetryError(
            f"backend amd_smi needs {error.name}; put ROCm's own wrapper (/opt/rocm/share/amd_smi) on PYTHONPATH, or "
            "install the amdsmi of the same ROCm release"
        ) from error
    # Without its library the import ends in KeyError('libamd_smi.so'), elsewhere in OSError, with an older library in
    # AttributeError: there is no narrower type.
    except Exception as error:
        words = " ".join(said.getvalue().split())
        raise TelemetryError(
            f"amdsmi cannot load libamd_smi.so: {error!r}{f', {words}' if words else ''}; set ROCM_PATH to the ROCm "
            "whose release the wrapper is of"
        ) from error


def library_generation(wrapper_version: str) -> int | None:
    """The first number of the library version a wrapper was made for, None for a release that is not known.

    A wrapper says `7.0.2` (ROCm's version) or `26.0.0+37d158ab` (the library's own).
    """
    major, _, rest = wrapper_version.partition(".")
    minor = rest.partition(".")[0]
    if not major.isdigit() or not minor.isdigit():
        return None
    return int(major) if int(major) >= _OWN_NUMBERING_FROM else _GENERATIONS.get((int(major), int(minor)))


class Metrics:
    """One answer of the metrics call. Fields by AMD SMI's names; a wrapper that lacks one has it not available."""

    def __init__(self, struct: ctypes.Structure, unset: Mapping[str, int]) -> None:
        """Wraps a filled `amdsmi_gpu_metrics_t`. `unset` has, by field, the value that means not available."""
        self._struct, self._unset = struct, unset

    def value(self, name: str) -> int:
        """A number. Raises `TelemetryError`: it is not available; the message is `NOT_AVAILABLE`."""
        number = getattr(self._struct, name, None)
        if number is None or number == self._unset[name]:
            raise TelemetryError(NOT_AVAILABLE)
        return int(number)

    def values(self, name: str) -> list[int]:
        """The numbers of an array that are available.

        Raises `TelemetryError`: none is; the message is `NOT_AVAILABLE`.
        """
        numbers = [int(number) for number in getattr(self._struct, name, ()) if number != self._unset[name]]
        if not numbers:
            raise TelemetryError(NOT_AVAILABLE)
        return numbers

    def has(self, name: str) -> bool:
        """Returns True where a number is available."""
        return getattr(self._struct, name, None) not in (None, self._unset.get(name))


def _unset_values(struct: type[ctypes.Structure]) -> dict[str, int]:
    """By integer field, also of arrays, its type's largest value; parts that are structures themselves are left out."""
    unset = {}
    fields: list[tuple[str, Any]] = [(name, kind) for name, kind, *_ in struct._fields_]
    for name, kind in fields:
        element = kind._type_ if issubclass(kind, ctypes.Array) else kind
        if not issubclass(element, ctypes.Structure):
            unset[name] = (1 << 8 * ctypes.sizeof(element)) - 1
    return unset


class Library:
    """The open library. Calls are serialised: below ROCm 7.2 it is not safe to call from two threads."""

    def __init__(self, package: Any) -> None:
        """Checks that wrapper and library belong together and starts the library.

        Raises `TelemetryError`: they do not, or it does not start.
        """
        self._package, self._wrapper = package, package.amdsmi_wrapper
        self._lock = threading.Lock()
        self._metrics_type: type[ctypes.Structure] = self._wrapper.amdsmi_gpu_metrics_t
        self._unset = _unset_values(self._metrics_type)
        self.wrapper_version = str(package.__version__)
        self.library_version = self._version()
        expected = library_generation(self.wrapper_version)
        if expected is None or expected != int(self.library_version.partition(".")[0]):
            known = ", ".join(f"{major}.{minor}" for major, minor in _GENERATIONS)
            wanted = f"a library {expected}.x" if expected else f"a release wattune does not know, which are {known}"
            raise TelemetryError(
                f"amdsmi {self.wrapper_version} is made for {wanted}, libamd_smi.so is {self.library_version}: their "
                "structures differ; use the wrapper of the installed ROCm (/opt/rocm/share/amd_smi)"
            )
        with contextlib.redirect_stdout(sys.stderr):
            self.call("amdsmi_init")

    def _version(self) -> str:
        # Below the package's own function, which reads another member in 6.4 than in 7: the first number of all.
        version = self._wrapper.amdsmi_version_t()
        self._check(self._wrapper.amdsmi_get_lib_version(ctypes.byref(version)))
        numbers = [getattr(version, name) for name, *_ in version._fields_[:3]]
        return ".".join(map(str, numbers))

    def _check(self, status: int) -> None:
        if status:
            names: Mapping[int, str] = self._wrapper.amdsmi_status_t__enumvalues
            raise TelemetryError(names.get(status, f"status {status}"))

    def call(self, function: str, *arguments: Any) -> Any:
        """Calls one of the package's functions.

        A text among the arguments names a member of an enumeration, as in `AmdSmiClkType.GFX`. Raises `TelemetryError`:
        it failed or this release lacks it; the message is AMD SMI's code.
        """
        call = getattr(self._package, function, None)
        if call is None:
            raise TelemetryError(f"amdsmi {self.wrapper_version} lacks {function}")
        given = [self.member(argument) if isinstance(argument, str) else argument for argument in arguments]
        try:
            with self._lock:
                return call(*given)
        # The package reads serial numbers and texts itself, and lets what it cannot read through.
        except (self._package.AmdSmiException, ValueError) as error:
            describe = getattr(error, "get_error_info", None)
            raise TelemetryError(str(describe(detailed=False)) if describe else str(error)) from error

    def member(self, text: str) -> Any:
        """Returns a member of an enumeration by a text such as `AmdSmiClkType.GFX`."""
        enumeration, _, member = text.partition(".")
        return getattr(getattr(self._package, enumeration), member)

    def metrics(self, handle: Any) -> Metrics:
        """Reads the firmware's metrics of a device, in one call.

        Raises `TelemetryError`: it failed; the message is AMD SMI's code.
        """
        struct = self._metrics_type()
        with self._lock:
            status = self._wrapper.amdsmi_get_gpu_metrics_info(handle, ctypes.byref(struct))
        self._check(status)
        return Metrics(struct, self._unset)

    def close(self) -> None:
        """Shuts the library down; does nothing where it is gone already."""
        with contextlib.suppress(TelemetryError):
            self.call("amdsmi_shut_down")
