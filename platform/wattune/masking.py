"""Texts made fit to be shown or kept: without secrets, and without control characters."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Final

MASK: Final = "***"

_USER: Final = re.compile(r"(://[^/@:\s]{0,200}):(?!\d+/)[^@\s]{1,200}@")
"""The password before a URL's host. SQLAlchemy takes one with a slash; digits and a slash are a port and a path."""

_QUERY: Final = re.compile(r"([?&]([\w.-]+)=)([^&#\s\"']+)")

_KNOWN: Final = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{12,}|gh[opsur]_[A-Za-z0-9]{12,}|(?:github_pat_|glpat-|xox[abeprs]-|npm_|nvapi-|AIza)[\w-]{12,}"
    r"|sk[-_](?:[A-Za-z0-9]{12,}|(?=[\w-]*\d)[\w-]{12,})|(?:AKIA|ASIA)[A-Z0-9]{12,}|eyJ[\w-]{6,}\.[\w-]{6,}\.[\w-]*)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----(?s:.{,9999}?)(?:-----END [A-Z ]*-----|\Z)"
)
"""Secrets that show by themselves what they are: Hugging Face, GitHub, GitLab, Slack, npm, NVIDIA, Google, OpenAI, AWS,
JSON web tokens (RFC 7519) and private keys (RFC 7468)."""

_HEADER: Final = re.compile(
    r"\b((?:authorization|(?:x-)?api-?key|[\w-]{1,40}-token)\"?\s*:\s*\"?(?:(?:bearer|basic|token|digest)\s+)?"
    r"|bearer\s+(?=[\w.~+/=-]{12})|cookie:\s*(?=.))(?:(?<=\w:)|(?<=\s)|(?<=\"))(?:(?<=ookie: )[^\"'\n]+|[^\s\"',]+)",
    re.IGNORECASE,
)

_WORD: Final = re.compile(r"(?:[^\s\"'|;&]|\"[^\"\n]*\"?|'[^'\n]*'?)+|[|;&]+")
_NAMED: Final = re.compile(r"(?s)[{(\[,]*([-+]{0,2})[\"']?([A-Za-z_][\w.-]*)[\"']?(?:([=:])(.*))?")

_PASSWORD_OF: Final = {
    "-p": r"(?:mysql|mariadb|mongo|7z)[\w-]*|sshpass|login",
    "-a": r"redis-cli",
    "-w": r"ldap\w+",
    "-P": r"(?:un)?zip|sqlcmd|bcp",
    "-u": r"curl|wget",
    "--user": r"curl|wget",
    "--proxy-user": r"curl|wget",
}
"""Options that are a password to some programs, and a port or a path to others."""
_AFTER_COLON: Final = ("-u", "--user", "--proxy-user")
"""Those of them that have the user before a colon."""

_HINT: Final = re.compile(
    "|".join([r"pass|pwd|secret|token(?!s\b|i[sz])|key|credential|[?&]sig", *_PASSWORD_OF.values()]), re.IGNORECASE
)
"""Parts of a line that is looked at word by word: an output may be of megabytes."""

_PARTS: Final = re.compile(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])")
_SECRET: Final = re.compile(r"\w*(?:password|passwd|passphrase|secret|credentials?|pwd)|sshpass|bearer|sig|signature")
_OF_KEYS: Final = re.compile(
    r"access|account|api|auth|client|encryption|hf|license|master|openai|private|secret|service|signing|ssh|wandb"
)
"""Words before `key` that make it a secret: other keys sort, or belong to an attention."""
_OF_TEXT: Final = re.compile(
    r"num|no|n|max|min|pad|eos|bos|unk|mask|sep|cls|special|image|audio|video|per|new|stop|end|start|begin|next"
    r"|first|last|each|single|prefix|suffix|eot|eod|user|system|assistant|tool|think"
)
"""Words before `token` that speak of tokens of text."""
_HARMLESS_ENDS: Final = re.compile(
    r"file|path|dir|size|len|length|dim|heads|head|type|name|names|bits|bytes|count|budget|ids|dropout|rate"
    r"|ratio|level|index|pos|stdin|policy|method|limit|url|parallelism"
)
_HARMLESS: Final = re.compile(r"|true|false|none|null|yes|no|auto|\$\{?\w+\}?|\*\*\*", re.IGNORECASE)
_NUMBER: Final = re.compile(r"-?[\d.]+(?:e-?\d+)?")

_SHORTEST: Final = 8
"""Characters of a secret that is looked for by its value: a shorter one may be part of any word."""

_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def _is_secret(name: str, value: str, kind: str) -> bool:
    """Tells by a name whether its value is a secret; `kind` is `-` of an option, `=` or `:` of others."""
    parts = [part.lower() for part in _PARTS.split(name) if part]
    if not parts or _HARMLESS_ENDS.fullmatch(parts[-1]) or _HARMLESS.fullmatch(value):
        return False
    if any(map(_SECRET.fullmatch, parts)) and not (kind == ":" and parts[-1] in ("sig", "signature")):
        return not value.startswith("/") or "pwd" not in parts
    numeric, variable = _NUMBER.fullmatch(value) is not None, kind == "=" and name.isupper()
    for before, part in zip(["", *parts], parts, strict=False):
        last = variable or part is parts[-1]
        if (
            part.endswith("token")
            and not _OF_TEXT.fullmatch(before)
            and last
            and (kind == "-" or variable or not numeric)
        ):
            return kind != ":" or before != ""
        if (part == "key" and _OF_KEYS.fullmatch(before)) or part == "apikey":
            return True
        if variable and not numeric and (part in ("key", "pass") or part.endswith("apikey")):
            return True
    return False


def without_secrets(text: str) -> str:
    """Returns a text without the secrets in it, such as `http://user:***@host/?token=***` or `--password ***`.

    It may be a message, a command line for a shell, or a program's output.
    """
    text = _HEADER.sub(rf"\1{MASK}", _KNOWN.sub(MASK, _USER.sub(rf"\1:{MASK}@", text)))
    text = _QUERY.sub(
        lambda found: f"{found[1]}{MASK}" if _is_secret(found[2], found[3], "-") or found[2] == "key" else found[0],
        text,
    )
    return "\n".join(map(_masked_line, text.split("\n")))


def _masked_line(line: str) -> str:
    if not _HINT.search(line):
        return line
    words = iter(_masked_words(_WORD.findall(line), _inside))
    return _WORD.sub(lambda _: next(words), line)


def _inside(word: str) -> str:
    """Masks what a word of a line quotes, such as the text for a shell."""
    before, *quoted = re.split("([\"'])", word)
    if quoted and (len(quoted) <= 80 or any(map(str.isspace, word))):  # 40 quotes: each is a call deeper
        return f"{before}{quoted[0]}{_masked_line(''.join(quoted[1:]))}"
    return word


def masked_arguments(arguments: Sequence[str]) -> list[str]:
    """Returns a command's arguments with the values of secret ones masked, such as `--hf-token ***`.

    `--token VALUE`, `--token=VALUE`, `TOKEN=VALUE` (as after `env`), `-p VALUE` of programs whose password it is,
    headers, URLs and values that show what they are. Nobody knows every program's options.
    """
    return _masked_words(arguments, without_secrets)


def masked_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns variables with the values of secret ones masked."""
    return {
        name: MASK if _is_secret(name.upper(), value, "=") else without_secrets(value)
        for name, value in variables.items()
    }


def without_values(text: str, variables: Mapping[str, str]) -> str:
    """Returns a text without secrets, and without the values of secret variables, wherever they stand in it."""
    masked = masked_environment(variables)
    values = {value for name, value in variables.items() if masked[name] == MASK and len(value) >= _SHORTEST}
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, MASK)
    return without_secrets(text)


def _masked_words(words: Sequence[str], otherwise: Callable[[str], str]) -> list[str]:
    """Masks words by the names before them, and by the program that they are given to."""
    masked: list[str] = []
    letters: set[str] = set()
    secret_next = ""
    for word in words:
        before, secret_next = secret_next, ""
        if before and not re.match(r"--|-[A-Za-z]\Z", word):
            masked.append(_masked_value(before, word, otherwise))
            continue
        if word.strip("|;&") == "":
            letters.clear()
        program = PurePath(word).name
        letters |= {letter for letter, programs in _PASSWORD_OF.items() if re.fullmatch(programs, program)}
        named = _NAMED.fullmatch(word)
        dashes, name, sign, value = named.groups("") if named else ("", "", "", "")
        kind = "-" if "-" in dashes else sign
        if word in letters:
            secret_next = word
            masked.append(word)
        elif (letter := word[:2]) in letters and (letter != "-u" or ":" in word):
            masked.append(f"{word.partition(':')[0]}:{MASK}" if letter == "-u" else f"{letter}{MASK}")
        elif value and _is_secret(name, value.strip("\"'"), kind):
            masked.append(f"{word.partition(sign)[0]}{sign}{MASK}")
        # Such as --env=API_KEY=VALUE:
        elif sign == "=" and value.count("=") < 9 and (inner := _NAMED.fullmatch(value)) and inner[3] == "=":
            masked.append(f"{word.partition(sign)[0]}{sign}{_masked_words([value], otherwise)[0]}")
        else:
            if kind and not value and _is_secret(name, "?", kind):
                secret_next = kind
            masked.append(otherwise(word))
    return masked


def _masked_value(before: str, word: str, otherwise: Callable[[str], str]) -> str:
    """Masks the word after an option: all of it or what follows the user and a colon, and nothing harmless."""
    user, colon, _ = word.partition(":") if before in _AFTER_COLON else ("", "", "")
    if (before in _AFTER_COLON and not colon) or _HARMLESS.fullmatch(word.strip("\"',")):
        return otherwise(word)
    return f"{user}{colon}{MASK}"


def printable(text: str) -> str:
    r"""Returns a text without characters that a terminal obeys; an escape becomes `\x1b`. Newlines and tabs stay."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
