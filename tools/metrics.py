"""Write docs/reference/metrics.md and metrics.ko.md from the dictionary of the SDK.

`.venv/bin/python tools/metrics.py`; tests/tidy fails while a page is not current.
"""

from __future__ import annotations

from pathlib import Path

from dure_sdk.dictionary import NODE, ROOTFS, SCOPES, SERIES

REFERENCE = Path(__file__).resolve().parent.parent / "docs" / "reference"
MADE = "<!-- Made by tools/metrics.py from sdk/src/dure_sdk/dictionary.py; change it there. -->\n\n"
ENGLISH = (
    "# System metrics in MLflow\n\n"
    + MADE
    + "Every key begins with `system/` and ends with `/rank<N>`; series of the node carry the node "
    "before the rank, if its name is known. MB is 10⁶ bytes. `gpu_<i>` is the position in the "
    "job's visible list; the tag `dure.sysmetrics.rank<N>.gpu_<i>` has the UUID. Percentages of "
    "`container_*` are of the limit; a series that needs a limit is absent without one.\n\n"
    "**For the risk of running out of memory read `container_memory_unreclaimable_percentage`.** "
    "Usage counts file cache that the kernel gives back before it kills; the node's percentage "
    "knows nothing of your limit.\n"
)
KOREAN = (
    "# MLflow의 시스템 메트릭\n\n"
    + MADE
    + "모든 키는 `system/`으로 시작해 `/rank<N>`으로 끝난다. 노드 범위 계열은 노드 이름을 알 때 "
    "순위 앞에 노드가 붙는다. MB는 10⁶바이트다. `gpu_<i>`는 작업에 보이는 목록의 위치이고 UUID는 "
    "태그 `dure.sysmetrics.rank<N>.gpu_<i>`에 있다. `container_*`의 백분율은 한도 대비이며, 한도가 "
    "필요한 계열은 한도가 없으면 나오지 않는다.\n\n"
    "**메모리 부족 위험은 `container_memory_unreclaimable_percentage`로 판단한다.** usage에는 커널이 "
    "프로세스를 죽이기 전에 되돌려받는 파일 캐시가 들어 있고, 노드 백분율은 작업의 한도를 모른다.\n"
)


def page(intro: str, head: tuple[str, ...], language: int) -> str:
    """One language: a table per scope."""
    text = intro
    for scope, titles in SCOPES.items():
        name = (
            "system/<series>/<node>/rank<N>"
            if scope in {NODE, ROOTFS}
            else "system/<series>/rank<N>"
        )
        text += f"\n## {titles[language]}\n\n`{name}`\n\n"
        text += "| " + " | ".join(head) + " |\n" + "| --- " * len(head) + "|\n"
        for s in SERIES:
            if s.scope == scope:
                words = s.korean if language else s.english
                text += f"| `{s.name}` | {s.unit} | {s.source} | {words} |\n"
    return text


def pages() -> dict[Path, str]:
    """Every page with its text."""
    return {
        REFERENCE / "metrics.md": page(ENGLISH, ("series", "unit", "source", "how to read it"), 0),
        REFERENCE / "metrics.ko.md": page(KOREAN, ("계열", "단위", "출처", "읽는 법"), 1),
    }


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
