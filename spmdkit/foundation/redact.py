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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
_SHAPED_NAME = re.compile(r"(?:.*[_-])?key|pat|.*[a-z0-9]Key", re.DOTALL)
_SHAPED_VALUE = re.compile(r"\S{16,}")
"""A value of this form is secret under a `_SHAPED_NAME`: `wandb_key`, but not `image_key: pixels`."""

_NAMED = "token|secret|passw|credential|signature|(?:api|access|account|shared|private)[_-]?(?:access)?[_-]?key"
_NAME_WORDS = ("token", "secret", "passw", "credential", "signature", "key", "pat=", "sig=")
_TOKEN_SIGNS = {
    "_": (
        *("hf_", "api_org_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "npm_", "pnu_", "rdme_", "glsa_"),
        *("glc_", "ntn_", "shpat_", "shpca_", "shppa_", "shpss_", "lin_api_", "rubygems_", "gsk_", "r8_", "sk_", "rk_"),
        *("dop_v1_", "doo_v1_", "dor_v1_", "dckr_pat_", "sntrys_", "sntryu_", "ops_eyJ", "fo1_", "fm2_", "pscale_"),
    ),
    "-": (
        *("sk-", "pplx-", "nvapi-", "glpat-", "glptt-", "gldt-", "glrt-", "glft-", "glcbt-", "gloas-", "glsoat-"),
        *("glagent-", "pypi-", "pul-", "PMAK-", "xapp-", "xkeysib-", "sq0atp-", "AGE-SECRET-KEY-"),
        *("xoxa-", "xoxb-", "xoxe-", "xoxo-", "xoxp-", "xoxr-", "xoxs-"),
    ),
    "A": ("AKIA", "ASIA", "ABIA", "ACCA", "ABSK", "LTAI", "AKCp", "AIza"),
    ".": ("ya29.", "SG.", "hvs.", "hvb.", "dp.pt."),
    "J": ("eyJ",),
    "a": ("dapi",),
    "/": (
        *("hooks.slack.com/services/", "hooks.slack.com/workflows/", "hooks.slack.com/triggers/", "hooks.zapier.com/"),
        *(
            "discord.com/api/webhooks/",
            "discordapp.com/api/webhooks/",
            "webhook.office.com/",
            "/open-apis/bot/v2/hook/",
        ),
        "api.telegram.org/bot",
    ),
}
"""The beginnings of tokens and of the URLs of webhooks, by a character in them: the rules of gitleaks that need no
context (config/gitleaks.toml, MIT, b58d3f10 of 2026-07-22) with shorter minimum lengths, and those of NVIDIA, Groq,
Replicate, Docker, Discord, Zapier, Feishu and Telegram."""
_LONG_RUN = 16
"""Minimum length of a token: characters of words, and `.+/=-`."""


def _pattern_of_tokens() -> re.Pattern[str]:
    urls = "|".join(map(re.escape, _TOKEN_SIGNS["/"]))
    others = "|".join(re.escape(sign) for kind, signs in _TOKEN_SIGNS.items() if kind != "/" for sign in signs)
    return re.compile(rf"({urls})[^\s'\"<>/]+[^\s'\"<>]*|\b(?:{others})[A-Za-z0-9][\w.+/=-]{{10,}}")


class _Shape(NamedTuple):
    """Credentials of one form: `pattern`, of which the last group is not hidden, and a fast test of whether a text and
    its lower-case form may contain one."""

    sieve: Callable[[str, str], bool]
    pattern: re.Pattern[str]


_TOKENS = _Shape(
    lambda text, _: any(kind in text and any(sign in text for sign in signs) for kind, signs in _TOKEN_SIGNS.items()),
    _pattern_of_tokens(),
)
_SHAPES = (
    _Shape(lambda text, _: "@" in text and "://" in text, re.compile(r"(?<=://)[^/@\s'\"]+(?=@)")),
    _Shape(
        lambda text, lower: "=" in text and any(word in lower for word in _NAME_WORDS),
        re.compile(
            rf"([?&](?:(?i:[\w-]*(?:{_NAMED})[\w-]*)|sig|key)=)[^&\s'\"#]+"
            rf"|(\b(?i:[\w-]*(?:{_NAMED})[\w-]*)=)[^\s,;'\"&)}}\]]+|(\b(?i:[\w-]*[_-]key|pat)=)[^\s,;'\"&)}}\]]{{16,}}"
        ),
    ),
    _Shape(
        lambda _, lower: "bearer" in lower or "basic" in lower,
        re.compile(r"(\b(?i:bearer|basic)\s+)[A-Za-z0-9._~+/=-]{8,}"),
    ),
    _TOKENS,
    _Shape(
        lambda text, _: "PRIVATE KEY-----" in text,
        re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"),
    ),
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


def _is_secret(name: str, value: str) -> bool:
    return is_secret_name(name) or bool(_SHAPED_NAME.fullmatch(name) and _SHAPED_VALUE.fullmatch(value))


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
        return HIDDEN if value and _is_secret(name, value) else redact_text(value)
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
    elif isinstance(value, str) and len(value) >= MIN_LENGTH and _is_secret(name, value) and value != HIDDEN:
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
    text = _without_known(text)
    lower = text.lower()
    for shape in _SHAPES:
        if shape.sieve(text, lower):
            text = shape.pattern.sub(_hidden, text)
    return text


def redact_lines(text: str) -> str:
    """Returns the `redact_text` of each line of a long text, at 100 MB/s or more if few lines may contain a secret. The
    patterns, at 5 MB/s, search these lines only."""
    text = _without_known(text)
    if "PRIVATE KEY-----" in text:
        return redact_text(text)
    lower = text.lower()
    shapes = [shape for shape in _SHAPES if (shape is not _TOKENS or _has_long_run(text)) and shape.sieve(text, lower)]
    if not shapes:
        return text
    lines = text.split("\n")
    for number, line in enumerate(lines):
        lower = line.lower()
        for shape in shapes:
            if shape.sieve(line, lower):
                lines[number] = line = shape.pattern.sub(_hidden, line)
    return "\n".join(lines)


_IN_RUN = bytes(chr(i).isalnum() or i > 127 or chr(i) in "_.+/=-" for i in range(256))


def _has_long_run(text: str) -> bool:
    """Returns whether `_LONG_RUN` characters of a token follow each other."""
    import numpy as np  # 0.1 s, only for long texts

    run = np.frombuffer(text.encode("utf-8", errors="replace").translate(_IN_RUN), np.uint8)
    length = 1
    while length < _LONG_RUN:
        run, length = run[length:] & run[:-length], 2 * length
    return bool(run.any())


def _without_known(text: str) -> str:
    for value in sorted(_known | _environment_secrets(), key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    return text


def _hidden(found: re.Match[str]) -> str:
    return f"{found[found.lastindex] if found.lastindex else ''}{HIDDEN}"


def _environment_secrets() -> set[str]:
    """Returns the values of environment variables with secret names. `PWD` is the current folder, not a secret."""
    names = [name for name in list(os.environ) if is_secret_name(name) and name not in ("PWD", "OLDPWD")]
    return {value for name in names if len(value := os.environ.get(name, "")) >= 8}  # a thread may remove one
