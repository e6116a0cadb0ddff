"""One frozen `Settings`, from a TOML file and `DURE_<SECTION>__<KEY>` variables.

An unknown key or a bad value stops the start with a clear sentence. Names that are no
settings: see `RESERVED`.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from dure.core.errors import DureError, ErrorCode
from dure.core.policy import Policy, profile_fields

RESERVED = frozenset(
    {
        "DURE_URL",
        "DURE_TOKEN",
        "DURE_LANG",
        "DURE_CONFIG",
        # Of the SDK, in jobs: a server may be started from inside one.
        "DURE_CGROUP_ROOT",
        "DURE_NODE_SERIES",
        "DURE_MLFLOW_RUN_ID",
        "DURE_LAST_WORDS_DIR",
    }
)


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of sections: a misspelt key is refused."""


class ServerSettings(Section, frozen=True, kw_only=True):
    """Where the server listens and keeps its state."""

    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65_535, description="0: any free port")] = 8470
    state_dir: Annotated[str, Meta(description="database, run directories, outputs")] = ""
    database: Annotated[str, Meta(description="empty: SQLite in state_dir; or postgresql://…")] = ""
    language: Annotated[str, Meta(pattern="^(en|ko)$", description="of texts without a reader")] = (
        "en"
    )
    admin: Annotated[str, Meta(description="user name of the first administrator")] = "admin"
    admin_lab: Annotated[str, Meta(description="lab of the first administrator")] = "ADMIN"


class EngineSettings(Section, frozen=True, kw_only=True):
    """Periods of the engine, in seconds."""

    sweep_s: Annotated[float, Meta(gt=0, description="dispatch sweep; hints come at once")] = 5.0
    idempotency_s: Annotated[
        float, Meta(gt=0, description="how long an Idempotency-Key is remembered")
    ] = 86_400.0


class LimitsSettings(Section, frozen=True, kw_only=True):
    """Request limits of the HTTP API, per token."""

    read_per_s: Annotated[float, Meta(gt=0, description="reads a second, sustained")] = 20.0
    read_burst: Annotated[int, Meta(ge=1, description="reads at once")] = 60
    submit_per_min: Annotated[float, Meta(gt=0, description="submits a minute")] = 60.0
    streams: Annotated[int, Meta(ge=1, description="open log or event streams")] = 5
    body_kib: Annotated[int, Meta(ge=1, description="largest request body")] = 1024


class DeclaredGpu(Section, frozen=True, kw_only=True):
    """Slots that an operator declares where there is no GPU, or tiers of real GPUs."""

    tier: Annotated[str, Meta(min_length=1, description="tier name")]
    count: Annotated[int, Meta(ge=1, le=64, description="how many slots")] = 1
    simulated: Annotated[bool, Meta(description="must be true: no GPU stands behind it")] = False


class DeclaredTier(Section, frozen=True, kw_only=True):
    """A tier that is made at first start, if it does not exist yet."""

    name: Annotated[str, Meta(min_length=1, description="tier name")]
    vram_gb: Annotated[float, Meta(gt=0, description="GPU memory")]
    tflops: Annotated[float, Meta(gt=0, description="charge rate")]
    sort_order: Annotated[int, Meta(description="higher is better")] = 0
    max_gpus: Annotated[int, Meta(ge=1, le=8, description="most GPUs of one job")] = 8


class NodeSettings(Section, frozen=True, kw_only=True):
    """The local machine as a node."""

    enabled: Annotated[bool, Meta(description="false: this server runs no jobs itself")] = True
    name: Annotated[str, Meta(description="empty: host name")] = ""
    reserve_mib: Annotated[int, Meta(ge=0, description="memory kept for the system")] = 1024
    gpu_tiers: Annotated[
        dict[str, str], Meta(description="tier of a GPU by the name its driver tells")
    ] = {}
    gpus: Annotated[tuple[DeclaredGpu, ...], Meta(description="declared slots")] = ()
    runtime: Annotated[
        str,
        Meta(
            pattern="^(auto|bubblewrap|apptainer|process)$",
            description="how jobs are confined; auto: the first of bubblewrap, apptainer, process"
            " that works; process confines nothing",
        ),
    ] = "auto"
    shared: Annotated[
        tuple[str, ...],
        Meta(description="folders that every jail shows, read-only; workdirs may lie in them"),
    ] = ()
    workdirs: Annotated[
        tuple[str, ...],
        Meta(description="folders in which a workdir may lie, besides those its user owns"),
    ] = ()
    processes: Annotated[int, Meta(ge=16, description="most processes and threads of one job")] = (
        4096
    )
    output_limit_mib: Annotated[
        int, Meta(ge=1, description="output folder of one job; beyond it writing files fails")
    ] = 102_400
    log_limit_mib: Annotated[
        int, Meta(ge=1, description="log of one job; beyond it what is printed is dropped")
    ] = 1024


class EdgeSettings(Section, frozen=True, kw_only=True):
    """Nodes that come and go, over Redis; both the server and the agents read it."""

    redis_url: Annotated[
        str, Meta(description="redis:// or rediss:// (TLS) address of the lease queue; empty: none")
    ] = ""
    key_prefix: Annotated[
        str, Meta(description="before every key; `{dure}:` keeps them in one slot of a cluster")
    ] = "dure:"
    allow_forgetful_redis: Annotated[
        bool, Meta(description="start though Redis may lose leases (no appendonly, eviction)")
    ] = False
    shared_runs: Annotated[
        str,
        Meta(description="runs on a folder that server and agents share; empty: none"),
    ] = ""
    agent_host: Annotated[
        str, Meta(description="address at which probes reach an agent; empty: found by itself")
    ] = ""
    agent_port: Annotated[
        int, Meta(ge=0, le=65_535, description="port of an agent's health answer; 0: none")
    ] = 8471
    lease_ttl_s: Annotated[
        float, Meta(gt=0, description="a lease without a beat for this long is given away")
    ] = 90.0
    ack_s: Annotated[
        float, Meta(gt=0, description="a dispatch nobody has acknowledged goes back in line")
    ] = 30.0
    beat_s: Annotated[
        float, Meta(gt=0, description="period of an agent's beat: 5,760 messages a day")
    ] = 15.0
    early_beat_s: Annotated[
        float, Meta(gt=0, description="period while its node is not STABLE: back in service sooner")
    ] = 5.0
    overdue_s: Annotated[
        float, Meta(gt=0, description="a beat this late makes the node SUSPECTED")
    ] = 5.0
    detection: Annotated[
        str, Meta(pattern="^(beats|polling)$", description="what decides: silence, or probes alone")
    ] = "beats"
    probe: Annotated[
        str, Meta(pattern="^(http|tcp|icmp|tailscale)$", description="how a node is asked")
    ] = "http"
    probe_timeout_s: Annotated[float, Meta(gt=0, description="longest wait for its answer")] = 2.0
    burst_s: Annotated[
        tuple[float, ...],
        Meta(min_length=1, description="probes after an overdue beat; all failed: OFFLINE"),
    ] = (0.0, 3.0, 8.0, 15.0)
    closed_grace_s: Annotated[
        float, Meta(ge=0, description="a closed connection may come back before it is probed")
    ] = 3.0
    stable_probe_s: Annotated[
        float, Meta(gt=0, description="polling: period while the node is STABLE")
    ] = 30.0
    suspected_probe_s: Annotated[
        float, Meta(gt=0, description="period of probes while it is SUSPECTED")
    ] = 10.0
    offline_probe_s: Annotated[
        float, Meta(gt=0, description="polling: period while it is OFFLINE")
    ] = 60.0
    suspected_limit_s: Annotated[
        float, Meta(gt=0, description="a node SUSPECTED for this long is OFFLINE (unstable)")
    ] = 300.0
    sample_stale_s: Annotated[
        float, Meta(gt=0, description="a reading of the GPUs older than this says nothing")
    ] = 60.0
    tick_s: Annotated[
        float, Meta(gt=0, description="period of the watchdog and of the lease sweep")
    ] = 1.0
    penalty_fall: Annotated[
        int, Meta(ge=0, description="points for each fall to OFFLINE without a good-bye")
    ] = 1000
    penalty_stop: Annotated[
        int, Meta(ge=0, description="above it the node gets no work: it flaps")
    ] = 2000
    penalty_free: Annotated[int, Meta(ge=1, description="below it the node gets work again")] = 750
    penalty_half_life_s: Annotated[float, Meta(gt=0, description="points halve in this time")] = (
        600.0
    )


class SlurmSettings(Section, frozen=True, kw_only=True):
    """A Slurm cluster as a backend; docs/howto/slurm.md tells what each line is for."""

    enabled: Annotated[bool, Meta(description="true: this server also runs jobs on Slurm")] = False
    run_root: Annotated[
        str, Meta(description="folder on storage that the nodes see under the same path")
    ] = ""
    bin_dir: Annotated[str, Meta(description="folder of sbatch, squeue, …; empty: PATH")] = ""
    conf: Annotated[str, Meta(description="slurm.conf; empty: SLURM_CONF or Slurm's own")] = ""
    python: Annotated[str, Meta(description="Python ≥ 3.9 on every node, for the supervisor")] = (
        "/usr/bin/python3"
    )
    as_user: Annotated[
        bool, Meta(description="jobs run as their user's account; needs root. false: as the server")
    ] = True
    accounts: Annotated[
        dict[str, str], Meta(description="Unix account by user, where the names differ")
    ] = {}
    tiers: Annotated[
        dict[str, str], Meta(description="tier by GRES type, or by partition for untyped GPUs")
    ] = {}
    partitions: Annotated[
        dict[str, str], Meta(description="partition by tier; empty: the node's first one")
    ] = {}
    preemptible: Annotated[
        tuple[str, ...], Meta(description="partitions whose jobs yield: their GPUs count as idle")
    ] = ()
    nodes: Annotated[tuple[str, ...], Meta(description="only these nodes; empty: all GPUs")] = ()
    account: Annotated[str, Meta(description="Slurm account of all jobs; empty: its default")] = ""
    qos: Annotated[str, Meta(description="QOS of all jobs; empty: Slurm's default")] = ""
    reserve_mib: Annotated[int, Meta(ge=0, description="memory of a node kept from jobs")] = 1024
    query_s: Annotated[
        float, Meta(ge=1, description="how often Slurm is asked; ends come by the files at once")
    ] = 5.0
    poll_s: Annotated[float, Meta(gt=0, description="how often run directories are looked at")] = (
        0.2
    )
    timeout_s: Annotated[
        float, Meta(gt=0, description="a command without an answer counts as Slurm away")
    ] = 15.0
    pending_s: Annotated[
        float, Meta(gt=0, description="a launch not started by then goes back in line")
    ] = 120.0
    settle_s: Annotated[
        float, Meta(gt=0, description="patience with shared storage that shows files late")
    ] = 15.0
    simulated: Annotated[
        bool, Meta(description="the GPUs are stand-ins without a driver: a test cluster")
    ] = False


class Settings(Section, frozen=True, kw_only=True):
    """All settings; docs/reference/settings.md lists them with default and reason."""

    server: ServerSettings = ServerSettings()
    engine: EngineSettings = EngineSettings()
    limits: LimitsSettings = LimitsSettings()
    node: NodeSettings = NodeSettings()
    edge: EdgeSettings = EdgeSettings()
    slurm: SlurmSettings = SlurmSettings()
    policy: Policy = Policy()
    tiers: tuple[DeclaredTier, ...] = ()

    def state_dir(self) -> Path:
        """Folder of everything that lasts, made absolute."""
        base = os.environ.get("XDG_STATE_HOME", "~/.local/state")
        return Path(self.server.state_dir or f"{base}/dure").expanduser().resolve()

    def database_url(self) -> str:
        """SQLAlchemy URL of the store."""
        if not self.server.database:
            return f"sqlite:///{self.state_dir() / 'dure.db'}"
        return self.server.database.replace("postgresql://", "postgresql+psycopg://", 1)


def load(path: Path | None = None, env: Mapping[str, str] | None = None) -> Settings:
    """Read settings; raise BAD_SETTING with the key and what is wrong with it."""
    env = os.environ if env is None else env
    raw: dict[str, Any] = {}
    if path is not None:
        try:
            raw = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise DureError(ErrorCode.BAD_SETTING, key=str(path), value=str(error)) from error
    for name, text in sorted(env.items()):
        if name.startswith("DURE_") and name not in RESERVED:
            _apply(raw, name, text)
    chosen = raw.get("policy")
    if isinstance(chosen, dict) and isinstance(chosen.get("profile"), str):
        raw["policy"] = profile_fields(chosen["profile"]) | chosen
    try:
        return msgspec.convert(raw, Settings, strict=True)
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from error


def _apply(raw: dict[str, Any], name: str, text: str) -> None:
    match = re.fullmatch(r"DURE_([A-Z]+)__([A-Z0-9_]+)", name)
    if match is None:
        raise DureError(ErrorCode.BAD_SETTING, key=name, value="is not DURE_<SECTION>__<KEY>")
    section, key = (part.lower() for part in match.groups())
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text
    table = raw.setdefault(section, {})
    if not isinstance(table, dict):
        raise DureError(ErrorCode.BAD_SETTING, key=name, value="is not a section")
    table[key] = value


def _refusal(message: str) -> DureError:
    text, _, where = message.partition(" - at `$.")
    return DureError(ErrorCode.BAD_SETTING, key=where.rstrip("`") or "settings", value=text)
