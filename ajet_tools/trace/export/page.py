"""The frame of an exported page: its head with the styles, light and dark, and its end."""

from __future__ import annotations

__all__ = ["END", "START"]

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"

_STYLE = """
:root { color-scheme: light dark; --text: #1c1d20; --back: #fdfdfc; --line: #d9d9d6; --dim: #63666b;
  --mask: #2f7de1; --weak: #d9822b; --good: #2e9e5b; --bad: #d0413e; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e6e3; --back: #17181a; --line: #3a3c40; --dim: #9da0a6;
  --mask: #5b9df0; --weak: #e39a4f; --good: #49b877; --bad: #e8645f; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 62rem;
  margin: 0 auto; padding: 1rem 1rem 5rem; }
h2 { font-size: 1.15rem; overflow-wrap: anywhere; } h3 { font-size: 1rem; margin: 1.5rem 0 .5rem; }
section + section { border-top: 2px solid var(--line); margin-top: 3rem; }
small, dt, th { color: var(--dim); font-weight: normal; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; }
dd { margin: 0; overflow-wrap: anywhere; }
table { border-collapse: collapse; } td, th { border-bottom: 1px solid var(--line); padding: .15rem .8rem .15rem 0;
  text-align: left; vertical-align: top; overflow-wrap: anywhere; }
pre { font: 13px/1.5 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; margin: .2rem 0; }
.error { color: var(--bad); }
.message { border-left: 3px solid var(--line); padding: .1rem 0 .1rem .8rem; margin: .6rem 0; }
.assistant { border-color: var(--mask); } .tool { border-color: var(--weak); } .user { border-color: var(--good); }
.tokens { font: 13px/1.9 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; color: var(--dim); }
.tokens .m { color: var(--text); border-radius: 2px; border-bottom: 1px solid var(--line); }
#colour { position: sticky; top: 0; background: var(--back); padding: .5rem 0; border-bottom: 1px solid var(--line); }
#colour label { margin-right: 1rem; }
body:has(#by-mask:checked) .m { background: color-mix(in srgb, var(--mask) 30%, transparent); }
body:has(#by-logprob:checked) .m { background: color-mix(in srgb, var(--weak) var(--l, 0%), transparent); }
body:has(#by-advantage:checked) .m { background: color-mix(in srgb, var(--good) calc(var(--p, 0%) * .7), transparent);
  box-shadow: inset 0 0 0 2em color-mix(in srgb, var(--bad) calc(var(--n, 0%) * .7), transparent); }
"""

START = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>ajet episodes</title><style>{_STYLE}</style></head><body>
<form id="colour">Tokens coloured by
<label><input type="radio" name="by" id="by-mask" checked> what was sampled</label>
<label><input type="radio" name="by" id="by-logprob"> improbability</label>
<label><input type="radio" name="by" id="by-advantage"> advantage</label>
<small>Point at a token for its id and values.</small></form>
"""

END = "</body></html>\n"
