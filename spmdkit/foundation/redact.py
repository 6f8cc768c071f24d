"""Detects secrets and replaces them by `***` in all files, records and messages of a run.

A value is secret by its name (`api_token`, `password`, `AWS_SECRET_ACCESS_KEY`), or by its form (a login in a URL,
`Bearer ...`, the tokens of well-known services, a private key). Values that are secret by name are registered, so that
the same text is also redacted in messages.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HIDDEN = "***"
MIN_LENGTH = 6
"""Minimum length of a value that is searched for in other texts, since shorter ones are common words."""

MAX_DEPTH = 64
MAX_CONFIG_BYTES = 2**16
"""Maximum number of characters of a config file that a launcher reads, to limit its start time."""

_PARTS = re.compile(r"passw|passphrase|secret|credential|apikey", re.IGNORECASE)
_WORDS = {"token", "tokens", "pwd", "auth", "authorization", "bearer", "cookie", "dsn"}
_KEYS = {"api", "access", "private", "secret", "signing", "encryption", "ssh", "license", "account", "storage"}
"""Words that make a `key` secret. Without them it is a name in a mapping."""
_OF_TEXT = {"pad", "eos", "bos", "mask", "unk", "sep", "cls", "start", "end", "stop", "special", "begin", "separator"}
"""Words that mark a `token` as a piece of text."""

_SPLIT = re.compile(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])")
_IN_TEXT = re.compile(
    r"(?P<url>(?<=://)[^/@\s'\"]+(?=@))"
    r"|(?P<query>(?i:[?&](?:[\w-]*(?:token|secret|passw|credential|signature|api[_-]?key|access[_-]?key)[\w-]*|sig|key)=))[^&\s'\"#]+"
    r"|(?P<scheme>\b(?i:bearer|basic)\s+)[A-Za-z0-9._~+/=-]{8,}"
    r"|(?P<named>\b(?i:[\w-]*(?:token|secret|passw(?:or)?d|credential|api[_-]?key|access[_-]?key)[\w-]*)=)[^\s,;'\"&)}\]]+"
    r"|\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[abprs]-[\w-]{10,}"
    r"|A(?:KIA|SIA)[A-Z0-9]{12,}|AIza[\w-]{30,}|ya29\.[\w-]{20,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{4,})"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
)

_known: set[str] = set()
"""Registered values that are secret by name. Texts are searched for them."""


@functools.lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Returns whether a value of this name is a secret. Cached, since all environment variables are checked for each
    text."""
    words = {word.lower() for word in _SPLIT.split(name) if word}
    if words & {"token", "tokens"} and words & _OF_TEXT:
        return False
    return bool(words & _WORDS or _PARTS.search(name)) or bool(words & {"key", "keys"} and words & _KEYS)


def redact_value(value: Any, name: str = "") -> Any:
    """Returns plain values with `***` in place of secrets; `name` is the key of `value`.

    Numbers and booleans are unchanged unless their key is a password.
    """
    if isinstance(value, Mapping):
        return {
            key: redact_value(inner, f"{name}_{key}" if is_secret_name(name) else str(key))
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact_value(inner, name) for inner in value]
    if isinstance(value, str):
        return HIDDEN if value and is_secret_name(name) else redact_text(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return HIDDEN if is_number and is_secret_name(name) and "passw" in name.lower() else value


def register_secrets(value: Any, name: str = "", depth: int = 0) -> None:
    """Registers the secrets among plain values. `redact_text` redacts them from then on."""
    if depth > MAX_DEPTH:
        return
    if isinstance(value, Mapping):
        for key, inner in value.items():
            register_secrets(inner, f"{name}_{key}" if is_secret_name(name) else str(key), depth + 1)
    elif isinstance(value, list | tuple):
        for inner in value:
            register_secrets(inner, name, depth + 1)
    elif isinstance(value, str) and len(value) >= MIN_LENGTH and is_secret_name(name) and value != HIDDEN:
        _known.add(value)


def register_variable(value: str) -> None:
    """Registers the value of an environment variable that a config refers to. Numbers and existing paths are no
    secrets."""
    is_number = re.fullmatch(r"[-+.\d]+(?:[eE][-+]?\d+)?", value) is not None
    if len(value) >= MIN_LENGTH and not is_number and not os.path.exists(value):
        _known.add(value)


def register_command_secrets(words: Sequence[str], files: bool = True) -> None:
    """Registers the secrets in a command's `key=value` arguments and, with `files`, in its readable config files."""
    import yaml  # takes 20 ms

    for word in words:
        key, equals, text = word.partition("=")
        with contextlib.suppress(OSError, ValueError, RecursionError, yaml.YAMLError):
            if not equals and not (files and word.endswith((".yaml", ".yml", ".json", ".toml"))):
                continue
            text = text if equals else Path(word).read_text()[:MAX_CONFIG_BYTES]
            if word.endswith(".toml"):
                register_secrets(tomllib.loads(text))
                continue
            if not any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):  # its length is unbounded
                register_secrets(yaml.safe_load(text), key if equals else "")


def redact_text(text: str) -> str:
    """Returns a text with `***` in place of registered secrets and values with the form of a secret."""
    for value in sorted(_known | _environment_secrets(), key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    return _IN_TEXT.sub(_hidden, text)


def _hidden(found: re.Match[str]) -> str:
    prefix = found.lastgroup and found.lastgroup != "url" and found[found.lastgroup]
    return f"{prefix or ''}{HIDDEN}"


def _environment_secrets() -> set[str]:
    """Returns the values of environment variables with secret names. `PWD` is the current folder, not a secret."""
    names = [name for name in list(os.environ) if is_secret_name(name) and name not in ("PWD", "OLDPWD")]
    return {value for name in names if len(value := os.environ.get(name, "")) >= 8}  # a thread may remove one
