"""Removal of secrets from files and messages, such as keys, passwords and URLs with credentials."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

__all__ = ["HIDDEN", "LEFT_OUT", "hide_places", "hide_secrets"]

HIDDEN = "(hidden)"
"""The replacement for a secret, the same for all secrets.

A hash would show whether two secrets differ, but a short secret can be guessed from its hash.
"""

LEFT_OUT = "(left out)"
"""The replacement for private information in a file that is made for other people."""

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")  # "APIKey_2" has the words "API" and "Key"

# Word endings that denote a secret anywhere in a name, such as "db_password" and "clientsecret_2".
_SECRET_WORDS = ("apikey", "credential", "passcode", "passphrase", "passwd", "password", "pwd", "secret", "webhook")

# Words that denote a secret before "key", including names of services. Most other keys name an entry: "batch_key".
_OF_SECRET_KEYS = (
    *("access", "account", "api", "auth", "encryption", "license", "private", "secret", "signing", "ssh"),
    *("anthropic", "aws", "azure", "comet", "github", "huggingface", "neptune", "openai", "wandb"),
)

# Words that denote a secret at the end of a name only.
_SECRET_HEADS = ("auth", "authorization", "bearer", "cookie", "dsn", "jwt", "pin", "pw", "sig", "signature")

# Words before "token" that do not denote a secret, in settings of language and vision models.
_OF_ORDINARY_TOKENS = (
    *(
        "additional",
        "begin",
        "blank",
        "bos",
        "class",
        "cls",
        "distill",
        "dist",
        "empty",
        "end",
        "eos",
        "fill",
        "forced",
    ),
    *("image", "mask", "no", "pad", "padding", "pool", "prefix", "readout", "register", "sep", "separator", "special"),
    *("start", "stop", "suffix", "unk", "unknown", "word"),
)

_ORDINARY_TOKEN = re.compile(r"[a-z]{0,7}|[<\[].*", re.DOTALL)  # "mean", "<pad>", "[CLS]"
_NO_TEXT = re.compile(r"|none|null|true|false|[+-]?[\d.]+(e[+-]?\d+)?", re.IGNORECASE)
_RANDOM = re.compile(r"(?=\D*\d)(?=[^A-Za-z]*[A-Za-z])\S*([A-Za-z0-9]{16}|[0-9a-f]{8}-[0-9a-f]{4}-)\S*", re.IGNORECASE)

# Secrets that are recognized by their form.
_FORM = re.compile(
    r"(?<=://)[^\s/]*(?=@)"  # the user name and password in a URL
    r"|(?<=://)[^\s/:@]+:(?!\d+/)[^\s@]{1,200}(?=@)"  # the same, if the password contains a slash
    r"|(?<![\w.+-])[\w.+-]+:[^\s:@/]{3,}(?=@\w)"  # the same, in a URL without a scheme
    r"|(?<=\bBearer )(?=\S*\d)[^\s\"']{8,}"
    r"|(?<=\bBasic )(?=\S*\d)[A-Za-z0-9+/]{12,}={0,2}"
    r"|(?<=\bhooks\.slack\.com/services/)\S+"
    r"|(?<![\w-])(?:"
    r"sk-(?:(?:proj|ant|or|svcacct|api\d+|v1)-){0,3}[A-Za-z0-9]{16}[\w-]*|[sr]k_(?:live|test)_\w{10,}"
    r"|hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|xox[abeprs]-[\w-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{12,}|AIza[\w-]{20,}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}[\w.-]*"
    r")"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*",
    re.DOTALL,
)

# The name of a setting in a text, as in "api_key=…", "'api_key': '…'", "?sig=…" and "--api-key …", and its value.
_NAME = re.compile(r"""(?<![\w.-])(?:([A-Za-z_][\w.-]*)["']?\s*[=:]\s*|--?([A-Za-z][\w-]*)(?:=|\s+))""")
_VALUE = re.compile(r"""(?:(?:Basic|Bearer|Token)\s+)?(?:\(hidden\)|"[^"]*"?|'[^']*'?|[^\s"'&;,)}\]]+)""")
_LONGEST = 200  # maximum number of characters of a value to check

# The folder of a file with a suffix, or an absolute path. A module name, such as blocks.0/linear, does not match.
_FOLDER = re.compile(
    r"""(?<![^\s'"(),;=])[^\s'"(),;=]*[\\/](?=[\w.\-]+\.\w{1,5}\b)|(?<![\w.)\]])(?:[A-Za-z]:|~)?[\\/][^\s'"(),;]*[\\/]"""
)
_ADDRESS = re.compile(r"\b[A-Za-z][\w+.-]{0,30}://[^\s'\"]+")

# The class and the message of an error. The class is kept. The message may quote a sample, and may precede advice.
_MESSAGE = re.compile(r"\b(failed: \w+|\w*(?:Error|Exception)): .*?(?=\. To know it: |$)", re.DOTALL)


def hide_secrets(value: Any, name: str = "") -> Any:
    """Return a value with ``"(hidden)"`` in place of its secrets.

    A string is hidden if the name of its setting denotes a secret. In other strings, only substrings with the form of a
    secret are hidden, such as ``user:password@`` in a URL, or the value of ``api_key=…``.

    Args:
        value: The value. Mappings, lists and tuples are searched.
        name: The name of the setting.

    Example:
        >>> hide_secrets({"lr": 0.1, "tokenizer": "bpe", "db": {"password": "hunter2"}})
        {'lr': 0.1, 'tokenizer': 'bpe', 'db': {'password': '(hidden)'}}
        >>> hide_secrets("postgresql://me:hunter2@host/data?sslmode=require")
        'postgresql://(hidden)@host/data?sslmode=require'
    """
    if isinstance(value, Mapping):
        return {key: hide_secrets(each, f"{name}.{key}") for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        found = [hide_secrets(each, name) for each in value]
        return found if isinstance(value, list) else tuple(found)
    if isinstance(value, str):
        return HIDDEN if _is_secret(name, value) else _without_secrets(value)
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return HIDDEN if is_number and _is_secret(name, str(value)) else value


def hide_places(text: str) -> str:
    """Return a text without folders, URLs and error messages. File names and error classes are kept.

    Example:
        >>> hide_places("sqrt at /home/me/net.py:42 of https://host/run")
        'sqrt at net.py:42 of (left out)'
        >>> hide_places("step 2 failed: KeyError: 'the text of a sample'")
        'step 2 failed: KeyError'
    """
    return _FOLDER.sub("", _ADDRESS.sub(LEFT_OUT, _MESSAGE.sub(r"\1", text)))


def _is_secret(name: str, text: str) -> bool:
    """Return True if the value of a setting is a secret, judging by the name of the setting."""
    words = [word.lower() for word in _WORD.findall(name)]
    head, before = ([*reversed(words), "", ""])[:2]
    if _NO_TEXT.fullmatch(text):
        return text.isdecimal() and (head.endswith(_SECRET_WORDS) or head == "pin")
    singular = [word.removesuffix("s") for word in words]
    has_secret_key = any(pair[0] in _OF_SECRET_KEYS and pair[1] == "key" for pair in pairwise(singular))
    if has_secret_key or head in _SECRET_HEADS or any(word.endswith(_SECRET_WORDS) for word in singular):
        return True
    if head.endswith("token"):
        return before not in _OF_ORDINARY_TOKENS and not _ORDINARY_TOKEN.fullmatch(text.strip("\"'"))
    return any(word.endswith(("key", "token")) for word in singular) and bool(_RANDOM.fullmatch(text))


def _without_secrets(text: str) -> str:
    """Return a text without the values of secret settings, and without substrings that have the form of a secret."""
    parts, end = [], 0
    for found in _NAME.finditer(text):
        begin = found.end()
        value = _VALUE.match(text, begin, begin + _LONGEST) if found.start() >= end else None
        if value is not None and _is_secret(found[1] or found[2], value[0]):
            parts += [text[end:begin], HIDDEN]
            end = begin + len(_VALUE.match(text, begin)[0])  # type: ignore[index]  # the pattern always matches here
    return _FORM.sub(HIDDEN, "".join([*parts, text[end:]]))
