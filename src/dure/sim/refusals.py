"""What the policy lab refuses, as stable codes with a sentence and what to do next."""

from __future__ import annotations

from enum import StrEnum

from dure.core.messages import Text, say


class Refusal(StrEnum):
    """Stable codes of a simulation that cannot begin."""

    UNREADABLE_FILE = "UNREADABLE_FILE"
    BAD_TRACE = "BAD_TRACE"
    BAD_CLUSTER = "BAD_CLUSTER"
    UNKNOWN_POLICY = "UNKNOWN_POLICY"
    NOTHING_FITS = "NOTHING_FITS"
    NOT_IN_ENGINE = "NOT_IN_ENGINE"
    NO_HISTORY = "NO_HISTORY"
    UNKNOWN_TIER = "UNKNOWN_TIER"
    UNKNOWN_NODE = "UNKNOWN_NODE"
    UNWRITABLE_FILE = "UNWRITABLE_FILE"


_SENTENCES: dict[Refusal, tuple[Text, Text]] = {
    Refusal.UNREADABLE_FILE: (
        ("{path} cannot be read: {problem}.", "{path}을(를) 읽을 수 없습니다: {problem}."),
        ("Check the name and its permissions.", "이름과 권한을 확인하십시오."),
    ),
    Refusal.BAD_TRACE: (
        ("{path}, line {line}: {problem}.", "{path} {line}번째 줄: {problem}."),
        (
            "A trace is CSV with the columns {columns}.",
            "기록은 {columns} 열이 있는 CSV입니다.",
        ),
    ),
    Refusal.BAD_CLUSTER: (
        (
            "{path} describes no cluster: {problem}.",
            "{path}은(는) 클러스터 설명이 아닙니다: {problem}.",
        ),
        (
            "See docs/concepts/policy-lab.md for its shape.",
            "형식은 docs/concepts/policy-lab.ko.md를 보십시오.",
        ),
    ),
    Refusal.UNKNOWN_POLICY: (
        ("There is no policy named {name}.", "{name}(이)라는 정책이 없습니다."),
        ("Known names: {known}.", "쓸 수 있는 이름: {known}."),
    ),
    Refusal.NOTHING_FITS: (
        (
            "None of the {jobs} jobs fits a node of this cluster.",
            "작업 {jobs}개 중 이 클러스터의 노드에 맞는 것이 없습니다.",
        ),
        (
            (
                "The largest node offers {most} GPUs of one tier; compare GPU counts, tier names "
                "and memory."
            ),
            "가장 큰 노드는 한 등급의 GPU {most}장입니다. GPU 수, 등급, 메모리를 비교하십시오.",
        ),
    ),
    Refusal.NOT_IN_ENGINE: (
        (
            "Policy {name} is a yardstick of the simulator, not one of the engine.",
            "정책 {name}은(는) 시뮬레이터의 비교 기준이며 엔진에는 없습니다.",
        ),
        (
            "Leave out --engine, or compare: {known}.",
            "--engine을 빼거나 다음을 비교하십시오: {known}.",
        ),
    ),
    Refusal.NO_HISTORY: (
        (
            "{where} holds no job that ran in the asked time.",
            "{where}에 해당 기간에 실행된 작업이 없습니다.",
        ),
        (
            "Ask for a longer time, or give the server's --config or --state-dir.",
            "기간을 늘리거나 서버의 --config 또는 --state-dir을 지정하십시오.",
        ),
    ),
    Refusal.UNKNOWN_TIER: (
        ("There is no tier named {name} here.", "여기에 {name}(이)라는 등급이 없습니다."),
        ("Known tiers: {known}.", "등급: {known}."),
    ),
    Refusal.UNKNOWN_NODE: (
        ("There is no node named {name} here.", "여기에 {name}(이)라는 노드가 없습니다."),
        ("Known nodes: {known}.", "노드: {known}."),
    ),
    Refusal.UNWRITABLE_FILE: (
        ("{path} cannot be written: {problem}.", "{path}에 쓸 수 없습니다: {problem}."),
        ("Choose another place.", "다른 위치를 고르십시오."),
    ),
}


class SimulationRefused(Exception):  # noqa: N818 - says what is so
    """A simulation that cannot begin: a stable code and the parameters of its sentence."""

    def __init__(self, code: Refusal, **params: str | int) -> None:
        self.code = code
        self.params = params
        super().__init__(self.text("en"))

    def text(self, lang: str) -> str:
        """The sentence and what to do next, a line each, with the code."""
        sentence, hint = _SENTENCES[self.code]
        return (
            f"{say(sentence, lang, self.params)}\n  {say(hint, lang, self.params)}\n  {self.code}"
        )
