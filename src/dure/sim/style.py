"""How a report looks: one style sheet, light and dark, colours that eyes of all kinds tell apart.

Hues after Okabe and Ito; lines differ by dashes too. Restrained: colour only where it
means something.
"""

from __future__ import annotations

_LIGHT_LINES = ("#0072b2", "#c84e00", "#00805c", "#a3467f", "#6b5200", "#131c26", "#586673")
_DARK_LINES = ("#56b4e9", "#f0a35e", "#45c79d", "#e79ac6", "#e8dc5a", "#e9eff4", "#93a1ae")
_DASHES = ("none", "7 3", "2 3", "9 3 2 3", "4 4", "12 4", "1 2")
_LIGHT_AREAS = ("#0072b2", "#e69f00", "#56b4e9", "#009e73", "#cc79a7", "#d55e00", "#f0e442")
_DARK_AREAS = ("#3d8fc4", "#e0a32e", "#8fd0f5", "#2fa985", "#d78bb4", "#dd7438", "#efe567")
OTHERS_CLASS = len(_LIGHT_AREAS)
LABS_SHOWN = len(_LIGHT_AREAS) + 1
POLICIES_DISTINCT = len(_LIGHT_LINES)

_PAGE = """
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);
font:15px/1.5 system-ui,"Noto Sans","Noto Sans KR","Noto Sans CJK KR",sans-serif}
:lang(ko){word-break:keep-all}
main{max-width:1080px;margin:0 auto;padding:28px 20px 56px}
h1{font-size:24px;line-height:1.25;margin:0 0 4px}
h2{font-size:18px;margin:36px 0 6px}
h3{font-size:15px;margin:22px 0 6px;overflow-wrap:anywhere}
p{margin:4px 0 10px;color:var(--ink2);max-width:72ch}
code{font:13px/1.5 ui-monospace,"DejaVu Sans Mono",monospace;overflow-wrap:anywhere;
color:var(--ink)}
.command{display:block;background:var(--sunken);padding:9px 12px;border-radius:6px;
margin:10px 0 16px}
.facts{display:grid;grid-template-columns:max-content 1fr;gap:3px 16px;margin:0 0 12px}
.facts dt{color:var(--ink3)}
.facts dd{margin:0;overflow-wrap:anywhere}
ul.notes{margin:0;padding:0 0 0 18px;color:var(--ink2);font-size:14px}
ul.notes li{margin:2px 0;max-width:90ch;overflow-wrap:anywhere}
.warn{color:var(--bad);font-weight:600}
.scroll{overflow-x:auto;background:var(--surface);border:1px solid var(--line);border-radius:8px}
table{border-collapse:collapse;width:100%;font-size:14px}
th,td{padding:6px 14px;text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
th{font-weight:600}
thead th{color:var(--ink2);border-bottom:1px solid var(--line)}
tbody tr+tr>*{border-top:1px solid var(--line)}
tbody tr.same>*{border-top-color:transparent}
tbody th,.name{text-align:left;font-weight:400}
.figures tbody th{min-width:9em;white-space:normal}
thead th:first-child{text-align:left}
thead .name{font-weight:600}
.spread{color:var(--ink3);font-size:12px}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,340px),1fr));gap:16px}
figure{margin:0;background:var(--surface);border:1px solid var(--line);border-radius:8px;
padding:12px 12px 8px}
figcaption{font-weight:600;font-size:14px}
figcaption span{display:block;font-weight:400;color:var(--ink3);font-size:13px}
svg{display:block;width:100%;height:auto;margin-top:6px}
svg text{font-size:11px;fill:var(--ink3)}
svg text.y{text-anchor:end}
svg text.x{text-anchor:middle}
.grid{stroke:var(--line);stroke-width:1}
.axis,.tick{stroke:var(--edge);stroke-width:1}
.level{stroke:var(--ink2);stroke-width:1;stroke-dasharray:3 3}
.line{fill:none;stroke-width:2;stroke-linejoin:round}
.area{stroke:var(--surface);stroke-width:.6}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;margin:8px 0 12px;padding:0;
list-style:none;font-size:14px}
.legend li{display:flex;align-items:center;gap:7px;overflow-wrap:anywhere}
.legend svg{width:26px;height:12px;margin:0;flex:none}
dl.meaning{display:grid;grid-template-columns:minmax(10em,max-content) 1fr;gap:6px 20px;
font-size:14px}
dl.meaning dt{font-weight:600}
dl.meaning dd{margin:0;color:var(--ink2);max-width:70ch}
footer{margin-top:36px;color:var(--ink3);font-size:13px}
@media (max-width:560px){main{padding:18px 12px 40px}th,td{padding:6px 9px}
svg text{font-size:13px}
.facts,dl.meaning{grid-template-columns:1fr;gap:0}.facts dd,dl.meaning dd{margin:0 0 8px}}
@media print{body{background:#fff}figure,tr{break-inside:avoid}}
"""
_LIGHT = (
    "--bg:#f3f5f7;--surface:#fff;--sunken:#e9edf1;--line:#d3dae1;--edge:#7f8c99;"
    "--ink:#131c26;--ink2:#3f4c59;--ink3:#586673;--bad:#b8321a;--rest:#a3adb7;"
)
_DARK = (
    "--bg:#0d131a;--surface:#141c25;--sunken:#1c2630;--line:#2a3743;--edge:#6e7f8f;"
    "--ink:#e9eff4;--ink2:#bac6d1;--ink3:#93a1ae;--bad:#ee7257;--rest:#5f6c78;"
)


def sheet() -> str:
    """The whole style sheet."""
    light = _LIGHT + _named("p", _LIGHT_LINES) + _named("a", _LIGHT_AREAS)
    dark = _DARK + _named("p", _DARK_LINES) + _named("a", _DARK_AREAS)
    lines = "".join(
        f".p{i}{{stroke:var(--p{i});stroke-dasharray:{dash}}}" for i, dash in enumerate(_DASHES)
    )
    areas = "".join(f".a{i}{{fill:var(--a{i})}}" for i in range(OTHERS_CLASS))
    return (
        f":root{{color-scheme:light dark;{light}}}"
        f"@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"
        f"{_PAGE}{lines}{areas}.a{OTHERS_CLASS}{{fill:var(--rest)}}"
    )


def _named(letter: str, colours: tuple[str, ...]) -> str:
    return "".join(f"--{letter}{i}:{colour};" for i, colour in enumerate(colours))
