"""Where the server is and who asks: arguments, then DURE_URL and DURE_TOKEN, then a file.

`~/.config/dure/config.toml` (XDG_CONFIG_HOME is honoured) is written with mode 0600:

    default = "lab"
    [profiles.lab]
    url = "https://dure.example.org"
    token = "dure_pat_…"

Rule: a token of the file goes only to the address it was saved for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

import msgspec

from dure.client.errors import BadConfig

DEFAULT_URL = "http://127.0.0.1:8470"
_TOKEN = re.compile(r"[\x21-\x7e]{1,500}")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """One server and the token for it. Its `repr` hides the token."""

    url: str = DEFAULT_URL
    token: str = ""
    language: str = ""

    def __repr__(self) -> str:
        """Show everything but the secret."""
        return f"Profile(url={self.url!r}, token={'set' if self.token else 'unset'})"


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The file."""

    default: str = "default"
    profiles: dict[str, Profile] = {}


def path() -> str:
    """Where the file is, whether or not it exists."""
    root = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")  # noqa: PTH111 - pathlib costs start-up
    return os.path.join(root, "dure", "config.toml")  # noqa: PTH118


def load() -> Config:
    """Read the file; an absent one is empty, a broken one is BadConfig."""
    where = path()
    try:
        with open(where, "rb") as file:  # noqa: PTH123
            text = file.read()
    except FileNotFoundError:
        return Config()
    except OSError as error:
        raise BadConfig(f"{where} cannot be read: {error.strerror}") from None
    import tomllib  # noqa: PLC0415 - only when there is a file

    try:
        return msgspec.convert(tomllib.loads(text.decode()), Config)
    except (ValueError, msgspec.ValidationError):
        # The reason may quote a line of the file, and so a token.
        raise BadConfig(f"{where} is not valid; correct it or run `dure login` anew") from None


def too_open() -> bool:
    """Whether others than the owner may read the file."""
    try:
        return bool(os.stat(path()).st_mode & 0o077)  # noqa: PTH116
    except OSError:
        return False


def save(name: str, profile: Profile) -> str:
    """Keep `profile` under `name` and make it the default; returns the file's path.

    Readable by the owner alone from the first byte on, replaced in one step.
    """
    if not _NAME.fullmatch(name):
        raise BadConfig(f"profile {name!r}: letters, digits, '-' and '_' only")
    old = load()
    new = Config(default=name, profiles={**old.profiles, name: profile})
    where = path()
    os.makedirs(os.path.dirname(where), mode=0o700, exist_ok=True)  # noqa: PTH103, PTH120
    half = f"{where}.{os.getpid()}"
    fd = os.open(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(_toml(new))
        os.replace(half, where)  # noqa: PTH105
    except BaseException:
        os.unlink(half)  # noqa: PTH108
        raise
    return where


def _toml(config: Config) -> str:
    lines = [f"default = {_quoted(config.default)}"]
    for name, profile in config.profiles.items():
        lines += ["", f"[profiles.{_quoted(name)}]"]
        fields: dict[str, str] = msgspec.to_builtins(profile)
        lines += [f"{key} = {_quoted(value)}" for key, value in fields.items() if value]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    # A JSON string is a TOML basic string.
    return msgspec.json.encode(text).decode()


def resolve(
    url: str | None = None,
    token: str | None = None,
    profile: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Profile:
    """Put address, token and language together from arguments, environment and file."""
    asked_url = url or (None if profile else environ.get("DURE_URL")) or None
    asked_token = token or (None if profile else environ.get("DURE_TOKEN")) or None
    if asked_url and asked_token:
        return Profile(url=clean_url(asked_url), token=clean_token(asked_token))
    config = load()
    if profile and profile not in config.profiles:
        known = ", ".join(sorted(config.profiles)) or "none"
        raise BadConfig(f"there is no profile {profile!r} (known: {known}); run `dure login`")
    stored = config.profiles.get(profile or config.default, Profile())
    if asked_url:
        wanted = clean_url(asked_url)
        same = [stored, *config.profiles.values()]
        stored = next((p for p in same if clean_url(p.url) == wanted), Profile(url=wanted))
    return Profile(
        url=clean_url(asked_url or stored.url),
        token=clean_token(asked_token or stored.token),
        language=stored.language,
    )


def clean_url(url: str) -> str:
    """Return the address without a trailing slash; BadConfig unless http(s)://host."""
    bare = url.strip().rstrip("/")
    if not re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#]*)?", bare):
        raise BadConfig(f"address {_without_login(url)!r}: write http://HOST:PORT or https://HOST")
    return bare


def _without_login(url: str) -> str:
    return re.sub(r"//[^/]*@", "//…@", url)


def clean_token(token: str) -> str:
    """Return the token without surrounding space; never quotes a bad one."""
    bare = token.strip()
    if bare and not _TOKEN.fullmatch(bare):
        raise BadConfig("the token has characters that no token has; copy it again")
    return bare
