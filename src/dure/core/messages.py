"""What people read: one table per kind of message, English and Korean side by side.

Rule: codes are stable, sentences are not; JSON never carries translated codes. A sentence
is a format string over the parameters of its code. English is written, not translated.
"""

from __future__ import annotations

from collections.abc import Mapping

from dure.core.errors import ErrorCode
from dure.core.model import JobState
from dure.core.plan import ReasonCode as R

Text = tuple[str, str]
"""(English, Korean)."""
LANGUAGES = ("en", "ko")

STATES: dict[str, Text] = {
    JobState.PERSONAL_QUEUE_WAIT: ("Personal queue", "개인 대기"),
    JobState.GLOBAL_QUEUE_WAIT: ("Waiting", "대기"),
    JobState.NODE_WAIT: ("Waiting for node", "노드 대기"),
    JobState.DISPATCHED: ("Starting", "시작 중"),
    JobState.RUNNING: ("Running", "실행 중"),
    JobState.CANCELLING: ("Stopping", "종료 중"),
    JobState.COMPLETED: ("Done", "완료"),
    JobState.FAILED: ("Failed", "실패"),
    JobState.TIMED_OUT: ("Timed out", "시간 초과"),
    JobState.CANCELLED: ("Cancelled", "취소"),
    JobState.DEAD: ("Dead", "유실"),
    "RETRYING": ("Retrying", "다시 시도"),
    "OOM_LIMIT": ("OOM at largest tier", "OOM 한계"),
}

REASONS: dict[R, Text] = {
    R.PERSONAL_LIMIT: (
        "You use {used} of your {limit} slots; it moves up when one of your jobs ends.",
        "슬롯 {limit}개 중 {used}개를 쓰고 있습니다. 작업이 하나 끝나면 올라갑니다.",
    ),
    R.RANK_BEHIND: (
        "{ahead} jobs stand before it: labs that used less first, then by time.",
        "앞에 작업 {ahead}개가 있습니다(사용량이 적은 연구실 먼저, 다음은 시간순).",
    ),
    R.SAME_LAB_BEHIND: (
        "Earlier jobs of its own lab stand before it (jobs ahead: {ahead}).",
        "같은 연구실의 먼저 들어온 작업 {ahead}개가 앞에 있습니다.",
    ),
    R.NO_FREE_GPU: (
        "It is first in line, but all {gpus} fitting GPUs are busy; it needs {needed}.",
        "맨 앞이지만 맞는 GPU {gpus}장이 모두 사용 중입니다. {needed}장이 필요합니다.",
    ),
    R.NEEDS_ONE_NODE: (
        "It needs {needed} GPUs in one node; {idle} are idle, at most {most} in one node.",
        "한 노드에 GPU {needed}장이 필요합니다. 유휴 {idle}장, 한 노드에 최대 {most}장입니다.",
    ),
    R.RESERVING: (
        "It holds {held} of {needed} GPUs on {node} and waits for the rest.",
        "{node}에서 GPU {needed}장 중 {held}장을 선점하고 나머지를 기다립니다.",
    ),
    R.RESERVATION_LOST: (
        "It lost its reservation and reserves anew when it is first in line again.",
        "선점을 잃었습니다. 다시 맨 앞이 되면 새로 선점합니다.",
    ),
    R.NEXT_CYCLE: ("It starts in the next cycle.", "다음 주기에 시작합니다."),
    R.OOM_ESCALATED: (
        "GPU memory ran out before; now only GPUs of {min_vram_gb:g} GB or more are tried.",
        "GPU 메모리가 부족했습니다. 이제 {min_vram_gb:g} GB 이상 GPU만 씁니다.",
    ),
    R.NODE_WAIT: (
        "No fitting node is in service; waiting for {waited} so far.",
        "맞는 노드가 가동 중이 아닙니다. {waited}째 기다리고 있습니다.",
    ),
    R.NODE_OFFLINE: ("Node {node} is offline.", "노드 {node}가 꺼져 있습니다."),
    R.NODE_SUSPECTED: (
        "Node {node} does not answer reliably; it takes no new work for now.",
        "노드 {node}의 응답이 불안정합니다. 지금은 새 작업을 받지 않습니다.",
    ),
    R.NODE_DRAINED: (
        "Node {node} was taken out of service by an administrator.",
        "관리자가 노드 {node}를 서비스에서 제외했습니다.",
    ),
    R.NODE_PENALTY: (
        "Node {node} failed too often and rests until {until}.",
        "노드 {node}가 자주 실패하여 {until}까지 쉽니다.",
    ),
    R.GPU_UNAVAILABLE: (
        "A GPU of {node} is sick or used by another program.",
        "{node}의 GPU가 고장이거나 다른 프로그램이 쓰고 있습니다.",
    ),
    R.RETRY_BACKOFF: (
        "Repeat {retry} starts after {until}.",
        "{retry}번째 다시 시도는 {until} 이후 시작합니다.",
    ),
    R.LAUNCH_RETRY: (
        "The node refused to start it ({refusals} in a row); it is tried again after {until}.",
        "노드가 시작을 거부했습니다(연속 {refusals}회). {until} 이후 다시 시도합니다.",
    ),
    R.NOT_BEFORE: (
        "It was asked not to start before {until}.",
        "{until} 이후 시작하도록 요청되었습니다.",
    ),
    R.HELD: (
        "It is held; release it to let it take its turn.",
        "보류 중입니다. 해제하면 차례를 기다립니다.",
    ),
    R.LAB_LIMIT: (
        "Your lab's limit is below the {num_gpus} GPUs it asks for.",
        "연구실 한도가 요청한 GPU {num_gpus}장보다 작습니다.",
    ),
    R.FIT_LOST: (
        "No placement fits it any more; change the request or ask an administrator.",
        "더 이상 맞는 배치가 없습니다. 요청을 바꾸거나 관리자에게 문의하십시오.",
    ),
    R.MAINTENANCE: (
        "Maintenance ({phase}): the queue is held and goes on afterwards in the same order.",
        "점검 중({phase})입니다. 대기열은 멈추고, 끝나면 같은 순서로 계속합니다.",
    ),
}

HINTS: dict[str, Text] = {
    "num_gpus": (
        "With {value} instead of {asked} GPUs it starts now on {node} ({tier}).",
        "GPU {asked}장 대신 {value}장이면 {node}({tier})에서 바로 시작합니다.",
    ),
    "tiers": (
        "Without the choice of GPU models it starts now on {node} ({tier}).",
        "GPU 모델을 지정하지 않으면 {node}({tier})에서 바로 시작합니다.",
    ),
    "node": (
        "Without the choice of a node it starts now on {node} ({tier}).",
        "노드를 지정하지 않으면 {node}({tier})에서 바로 시작합니다.",
    ),
    "min_vram_gb": (
        "With a smaller GPU memory it starts now on {node} ({tier}).",
        "GPU 메모리 요구를 낮추면 {node}({tier})에서 바로 시작합니다.",
    ),
}

RANK_CHANGES: dict[str, Text] = {
    "own": (
        "Its own lab was charged {cost} TFLOP-s for job {job} {ago} ago: it moved back.",
        "{ago} 전 같은 연구실의 작업 {job}에 {cost} TFLOP-s가 청구되어 뒤로 갔습니다.",
    ),
    "passed": (
        "{lab} was charged {ago} ago: it now stands behind.",
        "{ago} 전 {lab}에 청구되어 그 연구실이 뒤로 갔습니다.",
    ),
}

ETA: dict[str, Text] = {
    "band": ("in about {p50} ({p20} to {p80})", "약 {p50} 뒤({p20}~{p80})"),
    "open": ("in {p20} at the earliest", "빨라야 {p20} 뒤"),
    "after": ("{when}, when job {after} ends", "{when}, 작업 {after}이(가) 끝나면"),
}

E = ErrorCode
ERRORS: dict[ErrorCode, tuple[Text, Text]] = {
    E.INVALID_REQUEST: (
        ("The request is not valid.", "요청이 올바르지 않습니다."),
        ("See `errors` for the fields.", "`errors`의 항목을 확인하십시오."),
    ),
    E.NO_FIT_PLACEMENT: (
        (
            "No placement could ever run this request ({failed_constraint}).",
            "이 요청을 실행할 수 있는 배치가 없습니다({failed_constraint}).",
        ),
        ("`nearest_requests` would fit.", "`nearest_requests`는 실행할 수 있습니다."),
    ),
    E.TIME_LIMIT_TOO_LONG: (
        ("The time limit may be at most {limit_s} s.", "시간 제한은 최대 {limit_s}초입니다."),
        ("Ask for less and save checkpoints.", "더 짧게 요청하고 체크포인트를 저장하십시오."),
    ),
    E.GPU_LIMIT: (
        ("At most {limit} GPUs a job are allowed here.", "작업당 GPU는 최대 {limit}장입니다."),
        ("Ask for fewer GPUs.", "GPU 수를 줄이십시오."),
    ),
    E.QUEUE_LIMIT: (
        ("You have {limit} waiting jobs, the most allowed.", "대기 작업이 한도인 {limit}개입니다."),
        ("Wait for some to start, or cancel some.", "일부가 시작되기를 기다리거나 취소하십시오."),
    ),
    E.NOT_FOUND: (
        ("There is no {kind} {id}.", "{kind} {id}을(를) 찾을 수 없습니다."),
        ("Check the name or number.", "이름이나 번호를 확인하십시오."),
    ),
    E.UNAUTHENTICATED: (
        ("Sign in first: no valid token was sent.", "먼저 로그인하십시오. 유효한 토큰이 없습니다."),
        (
            "Run `dure login` or set DURE_TOKEN.",
            "`dure login`을 실행하거나 DURE_TOKEN을 설정하십시오.",
        ),
    ),
    E.FORBIDDEN: (
        ("You may not do this ({action}).", "권한이 없습니다({action})."),
        ("Ask the owner or an administrator.", "소유자나 관리자에게 문의하십시오."),
    ),
    E.WRONG_STATE: (
        (
            "Job {id} is {state}: {action} is not possible.",
            "작업 {id}은(는) {state} 상태라 {action}할 수 없습니다.",
        ),
        ("See `dure show {id}`.", "`dure show {id}`를 확인하십시오."),
    ),
    E.ALREADY_ENDED: (
        ("Job {id} had already ended ({state}).", "작업 {id}은(는) 이미 끝났습니다({state})."),
        ("Nothing was changed.", "바뀐 것이 없습니다."),
    ),
    E.IDEMPOTENCY_MISMATCH: (
        (
            "This Idempotency-Key was used for another request.",
            "이 Idempotency-Key는 다른 요청에 사용되었습니다.",
        ),
        ("Use a new key.", "새 키를 쓰십시오."),
    ),
    E.IDEMPOTENCY_IN_FLIGHT: (
        ("The same request is being worked on.", "같은 요청을 처리하고 있습니다."),
        ("Ask again in a moment.", "잠시 뒤 다시 요청하십시오."),
    ),
    E.PRECONDITION_REQUIRED: (
        ("This change needs an If-Match header.", "이 변경에는 If-Match 헤더가 필요합니다."),
        ("Read it first and send its ETag.", "먼저 읽고 그 ETag를 보내십시오."),
    ),
    E.STALE_EDIT: (
        ("Somebody changed it meanwhile.", "그동안 다른 사람이 변경했습니다."),
        ("Read it again and repeat your change.", "다시 읽고 변경을 반복하십시오."),
    ),
    E.SERVICE_MAINTENANCE: (
        (
            "Maintenance ({phase}): new work is not accepted now.",
            "점검 중({phase})이라 새 작업을 받지 않습니다.",
        ),
        ("Waiting jobs keep their place.", "대기 중인 작업의 순서는 유지됩니다."),
    ),
    E.RATE_LIMITED: (
        ("Too many requests.", "요청이 너무 많습니다."),
        ("Try again in {retry_after_s} s.", "{retry_after_s}초 뒤 다시 시도하십시오."),
    ),
    E.TOO_LARGE: (
        (
            "The request body is larger than {limit_kib} KiB.",
            "요청 본문이 {limit_kib} KiB보다 큽니다.",
        ),
        ("Send less at once.", "나누어 보내십시오."),
    ),
    E.IN_USE: (
        ("{kind} {id} is still in use.", "{kind} {id}은(는) 아직 사용 중입니다."),
        ("Free it first.", "먼저 비우십시오."),
    ),
    E.METHOD_NOT_ALLOWED: (
        ("This path does not take that method.", "이 경로는 그 메서드를 받지 않습니다."),
        ("See /v1/schema for what there is.", "/v1/schema를 확인하십시오."),
    ),
    E.UNSUPPORTED_MEDIA_TYPE: (
        ("Only application/json is understood.", "application/json만 받습니다."),
        ("Send Content-Type: application/json.", "Content-Type: application/json을 보내십시오."),
    ),
    E.BAD_SETTING: (
        ("Setting {key}: {value}", "설정 {key}: {value}"),
        (
            "Correct it; see docs/reference/settings.md.",
            "고치십시오. docs/reference/settings.md 참고.",
        ),
    ),
    E.STORE_FAILED: (
        ("The database did not take this: {reason}", "데이터베이스 오류: {reason}"),
        ("Nothing was changed; try again.", "바뀐 것이 없습니다. 다시 시도하십시오."),
    ),
    E.INTERNAL: (
        ("Something failed that should not.", "예상하지 못한 오류입니다."),
        ("Give the trace id to an administrator.", "trace id를 관리자에게 알려 주십시오."),
    ),
}

JOB_ERRORS: dict[str, Text] = {
    "EXIT_NONZERO": ("The command ended with an error.", "명령이 오류로 끝났습니다."),
    "TIME_LIMIT": (
        "The time limit was reached; files are kept.",
        "시간 제한에 도달했습니다. 파일은 남아 있습니다.",
    ),
    "GPU_OOM": ("GPU memory ran out on {tier}.", "{tier}에서 GPU 메모리가 부족했습니다."),
    "OOM_NO_LARGER_TIER": (
        "GPU memory ran out on {tier}, and no allowed tier has more. {hint_tier} would do.",
        "{tier}에서 GPU 메모리가 부족했고 더 큰 허용 등급이 없습니다. 가능한 등급: {hint_tier}",
    ),
    "OOM_NO_LARGER_TIER_ANYWHERE": (
        "GPU memory ran out on {tier}, and no GPU here has more.",
        "{tier}에서 GPU 메모리가 부족했고 여기에는 더 큰 GPU가 없습니다.",
    ),
    "HOST_OOM": (
        "Main memory ran out; no placement gives more than {memory_mib} MiB.",
        "주 메모리가 부족했습니다. {memory_mib} MiB보다 많이 주는 배치가 없습니다.",
    ),
    "LAUNCH_FAILED": ("It could not be started: {reason}", "시작할 수 없었습니다: {reason}"),
    "LEASE_EXPIRED": (
        "Its process was lost without a trace.",
        "프로세스가 흔적 없이 사라졌습니다.",
    ),
    "POISON_SUSPECTED": (
        "Its node was lost {losses} times soon after the start; it may be the job itself.",
        "시작 직후 노드를 {losses}번 잃었습니다. 작업 자체가 원인일 수 있습니다.",
    ),
}

EVENTS: dict[str, Text] = {
    "job.submitted": ("submitted", "제출됨"),
    "job.promoted": ("moved to the global queue", "전체 대기열로 이동"),
    "job.held": ("held", "보류됨"),
    "job.released": ("released", "보류 해제됨"),
    "job.edited": ("request changed", "요청 변경됨"),
    "job.reordered": ("moved in the personal queue", "개인 대기열에서 이동"),
    "job.node_wait": ("waits for a node", "노드를 기다림"),
    "job.node_back": ("a fitting node is back", "맞는 노드가 돌아옴"),
    "job.reserved": (
        "holds {held} of {needed} GPUs on {node}",
        "{node}에서 GPU {held}/{needed}장 선점",
    ),
    "job.reservation_ended": ("reservation on {node} ended ({cause})", "{node} 선점 종료({cause})"),
    "job.dispatched": (
        "sent to {node} ({tier} × {num_gpus})",
        "{node}로 보냄({tier} × {num_gpus})",
    ),
    "job.started": ("started (JOB_ATTEMPT {start_no})", "시작됨(JOB_ATTEMPT {start_no})"),
    "job.launch_refused": ("the node refused to start it", "노드가 시작을 거부함"),
    "job.retrying": ("will be repeated", "다시 시도 예정"),
    "job.oom_escalated": (
        "GPU memory ran out; moves to a larger GPU",
        "GPU 메모리 부족, 더 큰 GPU로 이동",
    ),
    "job.node_lost": ("its node was lost", "노드를 잃음"),
    "job.cancel_asked": ("cancel asked; SIGTERM sent", "취소 요청됨, SIGTERM 보냄"),
    "job.completed": ("completed", "완료됨"),
    "job.failed": ("failed ({outcome})", "실패함({outcome})"),
    "job.timed_out": ("reached its time limit", "시간 제한 도달"),
    "job.cancelled": ("cancelled", "취소됨"),
    "job.dead": ("given up", "포기됨"),
    "job.retried": ("retried by hand", "수동으로 다시 시도"),
    "job.gpus_freed": ("GPUs are free again", "GPU 반환됨"),
    "job.fit_lost": ("no placement fits any more", "맞는 배치가 없어짐"),
    "job.event_refused": ("a stale report was discarded", "오래된 보고를 버림"),
    "lab.changed": ("lab changed", "연구실 변경"),
    "lab.charged": ("lab charged", "연구실 사용량 기록"),
    "user.changed": ("user changed", "사용자 변경"),
    "tier.changed": ("tier changed", "등급 변경"),
    "tier.removed": ("tier removed", "등급 삭제"),
    "node.changed": ("node changed", "노드 변경"),
    "node.removed": ("node removed", "노드 삭제"),
    "maintenance.changed": ("maintenance phase changed", "점검 단계 변경"),
}


class _Known(dict[str, object]):
    """Parameters for a sentence; one that is missing shows as a dash, never as an error."""

    def __missing__(self, key: str) -> str:
        return "–"


def say(text: Text, lang: str, params: Mapping[str, object] | None = None) -> str:
    """A sentence in `lang`; any other language than Korean reads English."""
    template = text[1] if lang == "ko" else text[0]
    try:
        return template.format_map(_Known(params or {}))
    except (ValueError, TypeError):
        return template


def state_text(state: JobState, lang: str, *, retrying: bool = False, error: str = "") -> str:
    """The console's word for a state; a waiting repeat and the OOM limit have their own."""
    key: str = state
    if retrying:
        key = "RETRYING"
    elif error == "OOM_NO_LARGER_TIER":
        key = "OOM_LIMIT"
    return say(STATES[key], lang)


def job_error_text(code: str, params: Mapping[str, object], lang: str) -> str:
    """Sentence of a failed job's code."""
    if code == "OOM_NO_LARGER_TIER" and not params.get("hint_tier"):
        code = "OOM_NO_LARGER_TIER_ANYWHERE"
    return say(JOB_ERRORS.get(code, (code, code)), lang, params)


def duration(seconds: float, lang: str) -> str:
    """A length of time with at most two units: 45s, 12m, 3h 05m, 2d 4h."""
    units = ("일", "시간", "분", "초") if lang == "ko" else ("d", "h", "m", "s")
    s = max(0, round(seconds))
    if s < 60:
        return f"{s}{units[3]}"
    if s < 3600:
        return f"{s // 60}{units[2]}"
    if s < 86_400:
        hours, minutes = s // 3600, s % 3600 // 60
        return f"{hours}{units[1]} {minutes:02d}{units[2]}" if minutes else f"{hours}{units[1]}"
    days, hours = s // 86_400, s % 86_400 // 3600
    return f"{days}{units[0]} {hours}{units[1]}" if hours else f"{days}{units[0]}"
