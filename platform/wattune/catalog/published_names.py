"""Names as published tables write them, such as `Llama3.1-405B` on `H100-SXM-80GB`, as the catalog's."""

import re
from collections.abc import Collection
from typing import Final

PRECISIONS: Final = {
    **dict.fromkeys(("bf16", "amp_bf16", "mixed"), "bf16"),
    **dict.fromkeys(("fp8", "amp_fp8", "fp8-cs", "fp8-mx", "mxfp8", "nvfp4", "fp4"), "fp8"),
}
"""Data types by a table's word. No plan names four bits: fp8 stands for them where ratios of steps are asked for."""

SYSTEMS: Final = {"gb200": (64, "ndr"), "gb300": (64, "xdr"), "a100_sxm_80gb": (8, "hdr"), "a100_sxm_40gb": (8, "hdr")}
"""Devices that a fabric joins, of 72 a power of two, and network of its systems (datasheets of DGX A100 and NVL72)."""


def named(text: str, names: Collection[str]) -> str | None:
    """Returns the name that a text means: the one with most words, all of which are in the text. None without one."""
    said = [text] if text in names else _words(text)
    found = [one for one in names if {*_words(one)} <= {*said} or "".join(said).startswith("".join(_words(one)))]
    return text if text in names else max(found, key=lambda one: (len(_words(one)), -len(one)), default=None)


def _words(text: str) -> list[str]:
    """Returns its words, less `sxm` and `like`, which tables leave out; a number belongs to the word before."""
    said = re.sub(r"[ _-](sxm|like)(?=$|[ _-])", "", text.lower())
    return re.findall(r"[a-z0-9]+", re.sub(r"([a-z])[ _-](?=\d)", r"\1", said))
