"""Texts made fit to be shown or kept: without secrets, and without control characters."""

import re
from collections.abc import Sequence
from typing import Final

MASK: Final = "***"

_USER: Final = re.compile(r"(://[^/@:\s]*):(?!\d+/)[^@\s]+@")
"""The password before a URL's host. SQLAlchemy takes one with a slash; digits and a slash are a port and a path."""

_NAMING: Final = "token|password|passwd|secret|(?:api|access|private|wandb)[_-]?key|credential|signature"
_OPTION: Final = rf"[\w.-]*(?:{_NAMING})[\w.-]*|sig|pwd"
_QUERY: Final = re.compile(rf"([?&](?:{_OPTION})=)[^&#\s\"']+", re.IGNORECASE)
_ASSIGNED: Final = re.compile(rf"((?:--?)?(?:{_OPTION})=).+", re.IGNORECASE | re.DOTALL)
_FLAG: Final = re.compile(rf"--?(?:{_OPTION})", re.IGNORECASE)

_KNOWN: Final = re.compile(r"\b(?:hf_|ghp_|gho_|ghs_|github_pat_|glpat-|sk-|xox[abp]-|AKIA|ASIA)[\w-]{12,}")
"""Tokens that show by their beginning what they are: Hugging Face, GitHub, GitLab, OpenAI, Slack, AWS."""

_NOT_SECRET: Final = re.compile(
    r"[\w-]*(?:tokens|tokeni[sz])[\w-]*|(?:num|max|min|pad|eos|bos|unk|mask|sep|cls)[_-]token[\w-]*", re.IGNORECASE
)
"""Options of training programs that speak of tokens of text, such as `--max-tokens` or `--tokenizer`."""

_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def without_secrets(text: str) -> str:
    """Returns a text whose URLs show neither passwords nor tokens: `http://user:***@host/?token=***`."""
    return _QUERY.sub(rf"\1{MASK}", _KNOWN.sub(MASK, _USER.sub(rf"\1:{MASK}@", text)))


def masked_arguments(arguments: Sequence[str]) -> list[str]:
    """Returns a command's arguments with the values of secret ones masked, such as `--hf-token ***`.

    `--token VALUE`, `--token=VALUE`, `TOKEN=VALUE` (as after `env`), URLs and values that begin as known tokens do are
    masked. Nobody knows every program's options.
    """
    masked: list[str] = []
    secret_next = False
    for argument in arguments:
        name = argument.lstrip("-").partition("=")[0]
        if secret_next and not argument.startswith("--"):
            masked.append(MASK)
            secret_next = False
            continue
        about_text = _NOT_SECRET.fullmatch(name) is not None
        secret_next = not about_text and _FLAG.fullmatch(argument) is not None
        assigned = None if about_text else _ASSIGNED.fullmatch(argument)
        masked.append(f"{assigned[1]}{MASK}" if assigned else without_secrets(argument))
    return masked


def printable(text: str) -> str:
    r"""Returns a text without characters that a terminal obeys; an escape becomes `\x1b`. Newlines and tabs stay."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
