"""The page's style, light and dark, and the colours of its bars."""

from __future__ import annotations

# Parts of a step and kinds of memory, told apart by lightness too: (light page, dark page).
COLOURS = {
    "compute": ("#2f6db3", "#5b9bd5"),
    "matrix products": ("#1f4e80", "#4f8fd0"),
    "attention": ("#2f8f8a", "#55b8b2"),
    "between the products": ("#7fb3e0", "#9cc8ee"),
    "made again": ("#c7a13c", "#e0c067"),
    "sums over tp": ("#7a5ea8", "#a98fd3"),
    "head and embedding": ("#8aa3b8", "#b4c6d6"),
    "launches": ("#a0522d", "#cc8359"),
    "bubble": ("#d9d4c7", "#565b63"),
    "messages": ("#e08e2b", "#f0a94a"),
    "gradients": ("#b5475b", "#df7a8b"),
    "optimizer": ("#6f9f4f", "#93c572"),
    "fixed": ("#9b8bb8", "#b9a9d6"),
    "parameters": ("#1f4e80", "#4f8fd0"),
    "weight gradients": ("#2f8f8a", "#55b8b2"),
    "masters and moments": ("#6f9f4f", "#93c572"),
    "activations": ("#e08e2b", "#f0a94a"),
    "logits": ("#b5475b", "#df7a8b"),
    "buffers": ("#9b8bb8", "#b9a9d6"),
    "reserve": ("#cfd4da", "#4a4f57"),
}


def css() -> str:
    """The whole style sheet."""
    light = "".join(f"--{name_of(kind)}:{c[0]};" for kind, c in COLOURS.items())
    dark = "".join(f"--{name_of(kind)}:{c[1]};" for kind, c in COLOURS.items())
    return _SHEET.replace("LIGHT", light).replace("DARK", dark)


def name_of(kind: str) -> str:
    """The name of a kind in the style sheet."""
    return "c-" + kind.replace(" ", "-")


_SHEET = """
:root{color-scheme:light dark;--ink:#1c2026;--soft:#5b6470;--line:#dfe3e8;--page:#f6f7f9;
--card:#fff;--mark:#eaf2fb;--edge:#2f6db3;--bad:#b02a37;LIGHT}
@media (prefers-color-scheme:dark){:root{--ink:#e6e9ed;--soft:#a3acb8;--line:#353b44;--page:#15181c;
--card:#1d2126;--mark:#1f2e40;--edge:#5b9bd5;--bad:#ff8a94;DARK}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,"Segoe UI",Helvetica,Arial,sans-serif}
main{max-width:1180px;margin:0 auto;padding:32px 24px 64px}
h1{font-size:27px;line-height:1.25;margin:0 0 4px}
h2{font-size:19px;margin:0 0 4px}
p{margin:6px 0}
.soft{color:var(--soft)}
section{background:var(--card);border:1px solid var(--line);border-radius:12px;
padding:20px 24px;margin:20px 0}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(165px,1fr));gap:12px;margin:18px 0}
.tile{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:12px 16px}
.tile b{display:block;font-size:24px;line-height:1.3}
.tile span{color:var(--soft);font-size:13px}
code,pre{font:13.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
pre{background:var(--mark);border-left:4px solid var(--edge);border-radius:6px;padding:12px 14px;
margin:10px 0 0;white-space:pre-wrap}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th{font-weight:600;font-size:12.5px;color:var(--soft);text-align:right;padding:6px 8px;
border-bottom:1px solid var(--line);white-space:nowrap;vertical-align:bottom}
td{text-align:right;padding:7px 8px;border-bottom:1px solid var(--line);white-space:nowrap}
tr:last-child td{border-bottom:0}
th.l,td.l{text-align:left}
td.why{white-space:normal;min-width:230px;color:var(--soft);font-size:13.5px;line-height:1.35}
tr.best td{background:var(--mark)}
tr.best td:first-child{box-shadow:inset 4px 0 0 var(--edge)}
.bar{display:flex;height:16px;border-radius:3px;overflow:hidden;min-width:150px}
.bar i{display:block;height:100%}
.big .bar{height:40px;border-radius:6px}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;font-size:13px;color:var(--soft);margin:10px 0}
.legend i{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:6px;
vertical-align:-1px}
.held{position:relative}
.held .room{position:absolute;top:-3px;bottom:-3px;width:2px;background:var(--bad)}
.held .bar{height:20px;background:none;border-radius:3px}
.paper{background:#fff;border-radius:8px;padding:8px;overflow-x:auto;margin-top:12px}
.map{max-height:760px;overflow:auto}
.held{min-width:430px}
.paper svg{display:block;max-width:100%;height:auto}
ul.why{margin:8px 0 0;padding-left:20px}
ul.why li{margin:5px 0}
dl{display:grid;grid-template-columns:max-content 1fr;gap:4px 16px;margin:12px 0 0}
dt{font-weight:600;white-space:nowrap}
dd{margin:0;color:var(--soft)}
.worse{color:var(--bad);font-weight:600}
footer{color:var(--soft);font-size:13px;margin-top:24px}
"""
