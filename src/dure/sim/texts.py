"""Words of the policy lab, English and Korean: columns, report, terminal."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from dure.core.messages import Text, say


class Column(msgspec.Struct, frozen=True):
    """A row of the comparison: its key in `--json`, its name, what it means, how it is set."""

    key: str
    name: Text
    means: Text
    digits: int = 1
    percent: bool = False


COLUMNS = (
    Column(
        "mean_wait_h",
        ("Mean wait, h", "평균 대기, 시간"),
        ("From submit to start, over all jobs.", "제출부터 시작까지, 모든 작업의 평균입니다."),
        2,
    ),
    Column(
        "p95_wait_h",
        ("95th percentile wait, h", "대기 95백분위, 시간"),
        ("One job in twenty waited longer.", "스무 작업 중 하나는 이보다 오래 기다렸습니다."),
    ),
    Column(
        "max_wait_h",
        ("Longest wait, h", "최장 대기, 시간"),
        ("The unluckiest job.", "가장 오래 기다린 작업입니다."),
    ),
    Column(
        "wait_8gpu_h",
        ("8-GPU jobs: mean wait, h", "GPU 8장 작업의 평균 대기, 시간"),
        (
            "Large jobs need a whole node; 0 where the load has none.",
            "큰 작업은 노드 하나가 통째로 필요합니다. 없으면 0입니다.",
        ),
    ),
    Column(
        "p95_wait_8gpu_h",
        ("8-GPU jobs: 95th percentile, h", "GPU 8장 작업의 95백분위, 시간"),
        ("One large job in twenty waited longer.", "큰 작업 스물 중 하나는 더 기다렸습니다."),
    ),
    Column(
        "starvation_h",
        ("Longest time a lab waited without any GPU, h", "연구실이 GPU 없이 기다린 최장 시간"),
        (
            "The longest stretch in which a lab had jobs waiting and none running.",
            "대기 작업만 있고 실행 작업이 하나도 없던 가장 긴 구간입니다.",
        ),
    ),
    Column(
        "jain",
        ("Fairness (Jain), whole time", "공정성(Jain), 전체 기간"),
        (
            (
                "1: every lab received the same part of its equal-rights share. 1/n: one lab "
                "received everything."
            ),
            (
                "1이면 모든 연구실이 동등한 몫을 같은 비율로 받은 것이고, 1/n이면 한 연구실이 "
                "모두 받은 것입니다."
            ),
        ),
        3,
    ),
    Column(
        "jain_6h",
        ("Fairness (Jain), 6 h windows", "공정성(Jain), 6시간 구간"),
        (
            (
                "The same inside windows of 6 hours, over the labs that were waiting: fairness "
                "that people feel on the day."
            ),
            "6시간 구간마다 기다리던 연구실끼리 잰 값입니다. 그날 느끼는 공정성입니다.",
        ),
        3,
    ),
    Column(
        "worst_ratio",
        ("Worst lab: part of its share", "가장 못 받은 연구실의 몫 비율"),
        (
            "GPU time received over the equal-rights share, of the lab that got least of it.",
            "동등한 몫에 견주어 가장 적게 받은 연구실의 비율입니다.",
        ),
        2,
    ),
    Column(
        "queue_empty_d",
        ("Queue empty after, days", "대기열이 빈 시점, 일"),
        (
            "When nobody waits any more; earlier means less work was held up.",
            "기다리는 작업이 없어지는 시점입니다. 이를수록 덜 밀렸습니다.",
        ),
    ),
    Column(
        "utilisation",
        ("GPUs in use until then", "그때까지 GPU 사용률"),
        (
            "GPU time used over GPU time there was; over the whole time if nobody ever waited.",
            "있던 GPU 시간 중 쓴 비율입니다. 아무도 기다리지 않았으면 전체 기간의 비율입니다.",
        ),
        1,
        percent=True,
    ),
    Column(
        "reservations_broken_share",
        ("Reservations broken", "깨진 선점"),
        (
            "Reservations that ended before they led to a start.",
            "시작으로 이어지지 못하고 끝난 선점의 비율입니다.",
        ),
        0,
        percent=True,
    ),
    Column(
        "seconds",
        ("Simulated in, s", "계산 시간, 초"),
        ("How long this machine took.", "이 컴퓨터가 계산에 쓴 시간입니다."),
    ),
)

WORDS: dict[str, Text] = {
    "title": ("Policy comparison", "정책 비교"),
    "policy": ("Policy", "정책"),
    "gpus": ("GPUs", "GPU"),
    "jobs": ("Jobs", "작업"),
    "mean": ("Mean, h", "평균, 시간"),
    "median": ("Median, h", "중앙값, 시간"),
    "p95": ("95 %, h", "95 %, 시간"),
    "max": ("Longest, h", "최장, 시간"),
    "made": ("Made", "작성"),
    "load": ("Load", "부하"),
    "cluster": ("Cluster", "클러스터"),
    "summary": (
        (
            "{jobs:,} jobs of {labs} labs and {users} users, submitted over {days:.1f} days; "
            "{gpu_days:,.0f} GPU-days"
        ),
        (
            "연구실 {labs}곳, 사용자 {users}명이 {days:.1f}일 동안 제출한 작업 {jobs:,}개, "
            "GPU {gpu_days:,.0f}일분"
        ),
    ),
    "pool": ("{gpus} GPUs on {nodes} nodes", "노드 {nodes}대, GPU {gpus}장"),
    "nodes_of": ("{count} × {gpus} {tier}", "{tier} {gpus}장 × {count}대"),
    "rejected": (
        "{count} jobs of more than 8 GPUs are left out: no job may ask for so many.",
        "GPU 8장을 넘는 작업 {count}개는 뺐습니다. 한 작업이 요청할 수 없는 수입니다.",
    ),
    "unfit": (
        "{count} jobs are left out because no node could run them ({cases}).",
        "어떤 노드에도 맞지 않는 작업 {count}개는 뺐습니다({cases}).",
    ),
    "runs": (
        (
            "Mean ± standard deviation of {runs} runs with submit times moved by up to 30 s; "
            "charts and jobs.csv show the first run."
        ),
        (
            "제출 시각을 30초까지 움직인 {runs}회의 평균 ± 표준편차입니다. 그림과 jobs.csv는 "
            "첫 번째 결과입니다."
        ),
    ),
    "one_run": (
        (
            "One run. List scheduling is chaotic: another run of nearly the same load may differ; "
            "--jitter 10 shows by how much."
        ),
        (
            "한 번 계산한 값입니다. 거의 같은 부하라도 결과가 달라질 수 있으며 "
            "--jitter 10으로 그 폭을 볼 수 있습니다."
        ),
    ),
    "slots": ("At most {slots} jobs of a user at once.", "한 사용자가 동시에 최대 {slots}개."),
    "no_slots": ("No personal limit.", "개인 한도 없음."),
    "own_slots": ("Personal limits as the site has them.", "개인 한도는 이 설치의 설정대로."),
    "engine": (
        "Run by the whole engine in virtual time; its account closes ({checked} jobs checked).",
        "전체 엔진을 가상 시간으로 실행했습니다. 장부가 맞습니다(작업 {checked}개 점검).",
    ),
    "violation": ("Broken invariant under {case}: {detail}", "{case}에서 깨진 불변식: {detail}"),
    "all_columns": ("All figures", "모든 수치"),
    "by_gpus": ("Waits by GPU count", "GPU 수에 따른 대기"),
    "against": ("Policies against each other", "정책 견주기"),
    "labs_over_time": ("Labs over time", "시간에 따른 연구실"),
    "cdf": ("How long jobs waited", "작업이 기다린 시간"),
    "cdf_note": (
        (
            "Share of the jobs that had started after this long (time on a logarithmic axis). "
            "Higher and further left is better."
        ),
        "이 시간 안에 시작한 작업의 비율입니다(로그 시간축). 왼쪽 위일수록 좋습니다.",
    ),
    "utilisation": ("GPUs in use over time", "시간에 따른 GPU 사용"),
    "utilisation_note": (
        "Share of all GPUs that ran jobs. Gaps while others wait are what a policy costs.",
        "작업을 실행한 GPU의 비율입니다. 기다리는 작업이 있는데 빈 곳은 정책의 비용입니다.",
    ),
    "usage": ("GPUs in use, by lab", "연구실별 사용 GPU"),
    "queue": ("GPUs waited for, by lab", "연구실별 대기 GPU"),
    "labs_note": (
        (
            "Both charts of a policy, and those of all policies, have the same axes; they end when "
            "the last queue is empty."
        ),
        "모든 정책의 그림은 축이 같고, 마지막 대기열이 비는 때에 끝납니다.",
    ),
    "others": ("{count} others", "그 밖 {count}곳"),
    "days": ("{n} days", "{n}일"),
    "reading": ("What the figures mean", "수치의 뜻"),
    "at_most_minute": ("≤ 1 min", "1분 이하"),
    "minutes": ("{n} min", "{n}분"),
    "hours": ("{n} h", "{n}시간"),
    "day": ("1 day", "1일"),
    "week": ("1 week", "1주"),
    "month": ("30 days", "30일"),
    "written": ("Written: {path}", "저장함: {path}"),
    "history": (
        "History of this installation: the last {days:g} days until {until}.",
        "이 설치의 기록: {until}까지 최근 {days:g}일.",
    ),
    "really": (
        (
            "What people really waited then: mean {mean:.2f} h, 95 % {p95:.1f} h ({jobs} jobs). "
            "The replay of `site` differs from it where nodes were away or jobs were held."
        ),
        (
            "실제로 기다린 시간: 평균 {mean:.2f}시간, 95 % {p95:.1f}시간(작업 {jobs}개). "
            "노드가 꺼져 있었거나 작업을 보류했으면 `site`의 재현과 다릅니다."
        ),
    ),
    "running_then": (
        (
            "{count} jobs ran already when the window began; they occupy their GPUs and are not "
            "counted as waiting."
        ),
        "기간 시작 때 이미 실행 중이던 작업 {count}개는 GPU를 차지하되 대기에는 세지 않습니다.",
    ),
    "open_end": (
        "{count} jobs still run; they count as long as they have run so far.",
        "아직 실행 중인 작업 {count}개는 지금까지의 실행 시간으로 셉니다.",
    ),
    "never_ran": (
        "{count} jobs of that time never ran (waiting still, or cancelled); they are left out.",
        "그동안 한 번도 실행되지 않은 작업 {count}개(대기 중이거나 취소됨)는 뺐습니다.",
    ),
    "today": (
        "`today` is the site's own policy on the nodes there are; the rest has the changed ones.",
        "`today`는 지금 노드에서의 이 설치의 정책이고, 나머지는 바뀐 노드에서 계산했습니다.",
    ),
    "removed": ("Without node {name}.", "노드 {name} 제외."),
    "added": ("With {count} more nodes of {gpus} {tier}.", "{tier} {gpus}장 노드 {count}대 추가."),
    "assumed_up": (
        (
            "All nodes count as in service all the time, except {count} that administrators have "
            "drained."
        ),
        "관리자가 제외한 {count}대를 빼고 모든 노드가 늘 가동 중이라고 봅니다.",
    ),
}

Note = tuple[str, Mapping[str, object]]
"""A key of WORDS and the parameters of its sentence."""


def word(key: str, lang: str, **params: object) -> str:
    """A word or sentence of the lab."""
    return say(WORDS[key], lang, params)


def figure(column: Column, value: float, sd: float | None = None) -> str:
    """A figure as people read it, with its spread where there is one."""
    scale, unit = (100, " %") if column.percent else (1, "")
    text = f"{value * scale:,.{column.digits}f}"
    if sd is not None:
        text += f" ± {sd * scale:,.{column.digits}f}"
    return text + unit
