"""What the command line says itself: key -> (English, Korean), with named format fields.

Sentences about jobs and refusals come from the server in the caller's language; states,
reasons and codes stay in `core.messages`.
"""

from __future__ import annotations

import os

Text = tuple[str, str]

COMMANDS: dict[str, Text] = {
    "run": ("Submit a command and follow its output", "명령을 제출하고 출력을 따라 보기"),
    "submit": ("Submit a file or a command", "파일이나 명령 제출"),
    "queue": ("The line, in the scheduler's order", "스케줄러 순서 그대로의 대기열"),
    "why": ("Why a job waits", "작업이 기다리는 이유"),
    "jobs": ("List jobs, newest first", "작업 목록(최신순)"),
    "show": ("Everything about one job", "작업 하나의 모든 정보"),
    "logs": ("What a job printed", "작업의 출력"),
    "wait": ("Wait until jobs have ended", "작업이 끝날 때까지 기다리기"),
    "cancel": ("Stop jobs", "작업 취소"),
    "hold": ("Keep waiting jobs from starting", "대기 작업 보류"),
    "release": ("Let held jobs take their turn", "보류 해제"),
    "retry": ("Queue failed jobs again", "실패한 작업 다시 시도"),
    "rerun": ("Submit the same request as a new job", "같은 요청을 새 작업으로 제출"),
    "edit": ("Change a job's request", "작업 요청 변경"),
    "pool": ("GPUs: what is free now, and when", "GPU 현황: 지금과 다음 여유"),
    "forecast_score": ("How often forecasts came true", "예측 적중률"),
    "usage": ("What labs used, and what made it", "연구실 사용량과 그 내역"),
    "open": ("Open a job's page in the browser", "작업 페이지를 브라우저로 열기"),
    "login": ("Save address and token of a server", "서버 주소와 토큰 저장"),
    "completion": ("Print shell completion", "셸 자동 완성 출력"),
    "api": ("Send a raw API request", "API 요청 직접 보내기"),
    "admin": (
        "Tiers, nodes, labs, users, tokens, maintenance",
        "등급·노드·연구실·사용자·토큰·점검",
    ),
    "tier": ("GPU models", "GPU 등급"),
    "tier_ls": ("List tiers", "등급 목록"),
    "tier_set": ("Make or change a tier", "등급 추가 또는 변경"),
    "tier_rm": ("Remove a tier", "등급 삭제"),
    "node": ("Machines", "노드"),
    "node_ls": ("List nodes", "노드 목록"),
    "node_drain": ("Take a node out of service", "노드를 서비스에서 제외"),
    "node_resume": ("Put a node back to service", "노드를 서비스로 복귀"),
    "lab": ("Labs", "연구실"),
    "lab_ls": ("List labs", "연구실 목록"),
    "lab_set": ("Make or change a lab", "연구실 추가 또는 변경"),
    "user": ("People", "사용자"),
    "user_ls": ("List users", "사용자 목록"),
    "user_set": ("Make or change a user", "사용자 추가 또는 변경"),
    "token": ("API tokens", "API 토큰"),
    "token_ls": ("List tokens", "토큰 목록"),
    "token_new": ("Make a token", "토큰 만들기"),
    "token_rm": ("Make a token invalid", "토큰 폐기"),
    "maintenance": ("Maintenance", "점검"),
    "forecast": ("Expected starts", "시작 예측"),
    "maintenance_status": ("Show the phase", "단계 보기"),
    "maintenance_start": (
        "Stop starting jobs; running ones go on",
        "새 시작 중지(실행 중 작업은 계속)",
    ),
    "maintenance_end": ("Let the queue move again", "대기열 재개"),
}

SECTIONS: dict[str, Text] = {
    "work": ("Work", "작업"),
    "look": ("Look", "보기"),
    "control": ("Control", "제어"),
    "setup": ("Set up", "설정"),
    "server": ("Server", "서버"),
    "other": ("Commands", "명령"),
}

HEADERS: dict[str, Text] = {
    "rank": ("RANK", "순위"),
    "job": ("JOB", "작업"),
    "name": ("NAME", "이름"),
    "lab": ("LAB", "연구실"),
    "user": ("USER", "사용자"),
    "gpu": ("GPU", "GPU"),
    "wait": ("WAIT", "대기"),
    "reason": ("REASON", "이유"),
    "state": ("STATE", "상태"),
    "node": ("NODE", "노드"),
    "tier": ("TIER", "등급"),
    "time": ("TIME", "시간"),
    "submitted": ("SUBMITTED", "제출"),
    "exit": ("EXIT", "종료 코드"),
    "vram": ("VRAM", "VRAM"),
    "tflops": ("TFLOPS", "TFLOPS"),
    "run": ("RUN", "실행"),
    "reserved": ("RSV", "선점"),
    "idle": ("IDLE", "유휴"),
    "down": ("DOWN", "중단"),
    "start_now": ("START NOW", "바로 시작"),
    "next_free": ("NEXT FREE", "다음 여유"),
    "max_gpus": ("MAX GPUS", "최대 GPU"),
    "order": ("ORDER", "순서"),
    "active": ("ACTIVE", "사용"),
    "health": ("HEALTH", "상태"),
    "drained": ("DRAINED", "제외"),
    "backend": ("BACKEND", "백엔드"),
    "gpus": ("GPUS", "GPU"),
    "title": ("TITLE", "이름"),
    "weight": ("WEIGHT", "가중치"),
    "members": ("MEMBERS", "구성원"),
    "hours": ("4090-H", "4090-시간"),
    "tflop_s": ("TFLOP-S", "TFLOP-s"),
    "limits": ("LIMITS", "한도"),
    "role": ("ROLE", "역할"),
    "slots": ("SLOTS", "슬롯"),
    "id": ("ID", "ID"),
    "label": ("LABEL", "이름표"),
    "created": ("CREATED", "생성"),
    "expires": ("EXPIRES", "만료"),
    "last_used": ("LAST USED", "마지막 사용"),
    "epoch": ("EPOCH", "회차"),
    "kind": ("KIND", "종류"),
    "from": ("FROM", "시작"),
    "to": ("TO", "끝"),
    "lacks": ("LACKS", "부족"),
    "free_at": ("FREE AT", "비는 때"),
    "eta": ("EXPECTED", "예상"),
    "sooner": ("SOONER", "더 빨리"),
    "moved": ("MOVED", "순위 변동"),
    "scored": ("SCORED", "채점"),
    "inside": ("INSIDE P20-P80", "P20-P80 안"),
    "early": ("EARLY", "더 일찍"),
    "late": ("LATE", "더 늦게"),
    "outcome": ("OUTCOME", "결과"),
    "started": ("STARTED", "시작"),
    "ended": ("ENDED", "끝난 시각"),
    "command": ("COMMAND", "명령"),
    "error": ("ERROR", "오류"),
    "charge": ("CHARGE", "사용량"),
    "output": ("OUTPUT", "출력 위치"),
    "labels": ("LABELS", "이름표"),
    "version": ("VERSION", "버전"),
    "phase": ("PHASE", "단계"),
    "starts": ("STARTS", "시작 횟수"),
    "retries": ("RETRIES", "재시도"),
    "ahead": ("AHEAD", "앞선 연구실"),
    "as_of": ("AS OF", "기준 시각"),
    "reserved_use": ("RESERVED", "선점분"),
    "run_use": ("RUN", "실행분"),
    "opening": ("OPENING", "이월"),
    "charged": ("CHARGED", "기록분"),
    "usage": ("USAGE", "사용량"),
    "starts_now": ("STARTS NOW", "바로 시작"),
    "fits": ("FITS", "맞는 배치"),
    "cost_per_hour": ("COST PER HOUR", "시간당 사용량"),
}

SENTENCES: dict[str, Text] = {
    "submitted": (
        "✓ job {id} submitted   {name} · {request}",
        "✓ 작업 {id} 제출됨   {name} · {request}",
    ),
    "expected": ("Expected {when}.", "예상: {when}."),
    "ledger_sum": (
        "Charged lines: {lines} TFLOP-s = {charged} TFLOP-s in the account ({verdict})",
        "기록된 줄의 합 {lines} TFLOP-s = 계정 {charged} TFLOP-s ({verdict})",
    ),
    "reconciles": ("they agree", "일치"),
    "differs": ("THEY DIFFER: run `dure audit`", "불일치: `dure audit`를 실행하십시오"),
    "waiting_rank": (
        "● job {id} waits, rank {rank}   {reason}",
        "● 작업 {id} 대기, {rank}번째   {reason}",
    ),
    "waiting": ("● job {id}: {state}   {reason}", "● 작업 {id}: {state}   {reason}"),
    "view_hint": (
        "Ctrl-C leaves the view; the job goes on",
        "Ctrl-C를 눌러도 작업은 계속됩니다",
    ),
    "view_left": (
        "View left; job {id} goes on.  dure logs -f {id}   dure cancel {id}",
        "보기를 끝냈습니다. 작업 {id}은(는) 계속됩니다.  dure logs -f {id}   dure cancel {id}",
    ),
    "view_cancelled": ("Job {id}: cancel asked.", "작업 {id}: 취소를 요청했습니다."),
    "attempt": (
        "── attempt {start} on {node} ({tier})",
        "── {start}번째 실행, {node} ({tier})",
    ),
    "ended": (
        "{mark} job {id}: {state} after {took}{detail}",
        "{mark} 작업 {id}: {state}, {took}{detail}",
    ),
    "ended_unstarted": (
        "{mark} job {id}: {state}{detail}",
        "{mark} 작업 {id}: {state}{detail}",
    ),
    "exit_code": (" · exit {code}", " · 종료 코드 {code}"),
    "still": ("job {id} is still: {state}", "작업 {id}은(는) 아직 {state} 상태입니다."),
    "acted": ("✓ job {id}: {state}", "✓ 작업 {id}: {state}"),
    "stopping": (
        "✓ job {id}: stopping; it may save until {save} and is killed at {kill}",
        "✓ 작업 {id}: 종료 중. {save}까지 저장할 수 있고 {kill}에 강제 종료됩니다.",
    ),
    "rerun_as": (
        "✓ job {old} submitted again as {id}",
        "✓ 작업 {old}을(를) {id}(으)로 다시 제출함",
    ),
    "edited": ("✓ job {id} changed", "✓ 작업 {id} 변경됨"),
    "confirm_jobs": (
        "{action} {count} jobs ({jobs})?",
        "작업 {count}개({jobs})에 {action}을(를) 할까요?",
    ),
    "confirm_remove": ("Remove {what} {name}?", "{what} {name}을(를) 삭제할까요?"),
    "confirm_force": (
        "Drain {name} and stop what runs there?",
        "{name}을(를) 제외하고 실행 중인 작업을 멈출까요?",
    ),
    "declined": ("Nothing was changed.", "바뀐 것이 없습니다."),
    "needs_yes": (
        "this needs a confirmation; add --yes",
        "확인이 필요합니다. --yes를 붙이십시오.",
    ),
    "code_line": ("  code {code} · trace {trace}", "  코드 {code} · trace {trace}"),
    "code_only": ("  code {code}", "  코드 {code}"),
    "nearest": ("  would fit: {flags}", "  가능한 요청: {flags}"),
    "unreachable": ("{url} does not answer: {reason}", "{url}이(가) 응답하지 않습니다: {reason}"),
    "unreachable_hint": (
        "  Is the address right (DURE_URL, dure login), and the server up?",
        "  주소(DURE_URL, dure login)와 서버 상태를 확인하십시오.",
    ),
    "job_went_on": (
        "  Job {id} was submitted and goes on.",
        "  작업 {id}은(는) 제출되었고 계속됩니다.",
    ),
    "unexpected": ("Unexpected: {kind}: {detail}", "예상하지 못한 오류: {kind}: {detail}"),
    "unexpected_hint": ("  `dure -v …` shows where.", "  `dure -v …`로 위치를 볼 수 있습니다."),
    "config_open": (
        "warning: {path} can be read by others; run: chmod 600 {path}",
        "경고: 다른 사용자가 {path}을(를) 읽을 수 있습니다. chmod 600 {path}",
    ),
    "no_job": ("There is no job of yours named {name}.", "{name}(이)라는 내 작업이 없습니다."),
    "no_last": ("You have no jobs yet.", "아직 제출한 작업이 없습니다."),
    "long_range": (
        "range {ref} names more than {limit} jobs",
        "범위 {ref}이(가) {limit}개를 넘습니다.",
    ),
    "one_job": (
        "{ref} names several jobs; one is needed",
        "{ref}은(는) 여러 작업입니다. 하나만 지정하십시오.",
    ),
    "bad_range": ("range {ref} runs backwards", "범위 {ref}의 순서가 거꾸로입니다."),
    "unknown_field": (
        "unknown field: {bad}. Known: {known}",
        "알 수 없는 필드: {bad}. 가능한 필드: {known}",
    ),
    "json_last": (
        "(put --json last to print all fields)",
        "(모든 필드는 --json을 맨 뒤에 두십시오)",
    ),
    "no_such_file": (
        "{file} is no file; put -- before a command: dure submit -- {file} …",
        "{file} 파일이 없습니다. 명령이라면 앞에 --를 두십시오: dure submit -- {file} …",
    ),
    "no_command": (
        "a command is missing: dure {verb} -- CMD …",
        "명령이 없습니다: dure {verb} -- CMD …",
    ),
    "sbatch_ignored": (
        "warning: {count} #SBATCH lines of {file} are ignored; give flags (-g, -t, --vram …)",
        "경고: {file}의 #SBATCH {count}줄은 무시됩니다. 옵션(-g, -t, --vram …)으로 주십시오.",
    ),
    "env_unset": (
        "{name} is not set here; write {name}=VALUE",
        "{name}이(가) 설정되어 있지 않습니다. {name}=값",
    ),
    "not_a_pair": ("{text!r} is not NAME=VALUE", "{text!r}은(는) 이름=값 형식이 아닙니다."),
    "nothing_to_edit": ("nothing to change was given", "변경할 내용이 없습니다."),
    "nothing_waits": (
        "Nobody is waiting.",
        "기다리는 작업이 없습니다.",
    ),
    "only_personal": (
        "Nobody is in the line; jobs in personal queues: {personal}.",
        "대기열에 작업이 없습니다. 개인 대기 {personal}개.",
    ),
    "queue_foot": (
        "{shown} of {waiting} waiting · personal {personal} · for a node {node_wait}",
        "대기 {waiting}개 중 {shown}개 · 개인 대기 {personal} · 노드 대기 {node_wait}",
    ),
    "queue_phase": ("Maintenance: {phase}", "점검 중: {phase}"),
    "no_jobs": ("No jobs match.", "맞는 작업이 없습니다."),
    "no_gpus": ("There are no GPUs yet.", "아직 GPU가 없습니다."),
    "now": ("now", "지금"),
    "free_in": ("1 in {after}", "{after} 뒤 1장"),
    "startable": ("{count} (max {most}/job)", "{count} (작업당 최대 {most})"),
    "none": ("—", "—"),
    "simulated": ("(simulated)", "(simulated)"),
    "yes": ("yes", "예"),
    "no": ("no", "아니요"),
    "ended_state": ("It does not wait.", "기다리는 상태가 아닙니다."),
    "preview_now": ("It would start now.", "바로 시작합니다."),
    "preview_wait": (
        "It would wait; {ahead} jobs stand before it.",
        "대기합니다. 앞에 작업 {ahead}개가 있습니다.",
    ),
    "preview_slots": ("Slots: {used} of {limit} used.", "슬롯: {limit}개 중 {used}개 사용."),
    "preview_nowhere": ("Nothing here fits it.", "맞는 배치가 없습니다."),
    "token_prompt": ("Token", "토큰"),
    "url_prompt": ("Address of the server", "서버 주소"),
    "needs_stdin": (
        "no terminal to ask for the token; pipe it to: dure login --token-stdin",
        "토큰을 물어볼 터미널이 없습니다: dure login --token-stdin",
    ),
    "empty_token": ("no token was given", "토큰이 없습니다."),
    "plain_http": (
        "warning: {url} is not https; the token travels readable",
        "경고: {url}은(는) https가 아니어서 토큰이 그대로 전송됩니다.",
    ),
    "signed_in": (
        "✓ signed in to {url} as {user} ({lab}); saved in {path}",
        "✓ {url}에 {user}({lab})(으)로 로그인함. {path}에 저장",
    ),
    "saved": ("✓ {what} {name} saved", "✓ {what} {name} 저장됨"),
    "removed": ("✓ {what} {name} removed", "✓ {what} {name} 삭제됨"),
    "drained": ("✓ node {name} takes no new jobs", "✓ 노드 {name}: 새 작업을 받지 않음"),
    "resumed": ("✓ node {name} takes jobs again", "✓ 노드 {name}: 작업을 다시 받음"),
    "token_once": ("The token is shown this once:", "토큰은 지금 한 번만 보입니다:"),
    "phase_is": ("✓ maintenance phase: {phase}", "✓ 점검 단계: {phase}"),
    "tier_needs": (
        "a new tier needs --vram-gb and --tflops",
        "새 등급에는 --vram-gb와 --tflops가 필요합니다.",
    ),
    "user_needs": ("a new user needs --lab", "새 사용자에는 --lab이 필요합니다."),
    "bad_path": ("the path begins with /: /v1/me", "경로는 /로 시작합니다: /v1/me"),
    "bad_body": ("the body is not JSON: {detail}", "본문이 JSON이 아닙니다: {detail}"),
    "did_you_mean": ("Did you mean {name}?", "{name}을(를) 찾으셨습니까?"),
    "what_tier": ("tier", "등급"),
    "what_lab": ("lab", "연구실"),
    "what_user": ("user", "사용자"),
    "what_token": ("token", "토큰"),
    "act_cancel": ("Cancel", "취소"),
}


def lang() -> str:
    """Return `ko` or `en`: DURE_LANG, else the locale's."""
    for name in ("DURE_LANG", "LC_ALL", "LC_MESSAGES", "LANG"):
        value = os.environ.get(name)
        if value:
            return "ko" if value.lower().startswith("ko") else "en"
    return "en"


def pick(text: Text, language: str | None = None) -> str:
    """Return one side of a text."""
    return text[1] if (language or lang()) == "ko" else text[0]


def say(key: str, **params: object) -> str:
    """A sentence in the reader's language."""
    return pick(SENTENCES[key]).format(**params)
