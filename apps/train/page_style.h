#pragma once

namespace cadre::train {

/// The style sheet of the report: light or dark as the reader's system says.
inline constexpr const char* kPageStyle = R"css(
:root { color-scheme: light dark; --paper: #fcfcfa; --card: #ffffff; --ink: #1c1e21;
  --quiet: #6a6f76; --line: #e3e4e0; --over: #d9480f; --under: #1971c2;
  --c0: #2563c9; --c1: #d9580d; --c2: #0f8a5f; --c3: #8b44c8;
  --c4: #b3852b; --c5: #c22a63; --c6: #4b7385; --c7: #6b5a4a; }
@media (prefers-color-scheme: dark) { :root { --paper: #15171a; --card: #1d2024; --ink: #e8e8e4;
  --quiet: #9aa0a8; --line: #33373d; --over: #ff8a4c; --under: #4dabf7;
  --c0: #74a8ff; --c1: #ff9d5c; --c2: #45cf9a; --c3: #c79bff;
  --c4: #e0bb62; --c5: #ff7fae; --c6: #93bccf; --c7: #c2ad98; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", "Helvetica Neue", sans-serif; }
main { max-width: 960px; margin: 0 auto; padding: 48px 20px 64px; }
h1 { font-size: 2.1rem; letter-spacing: -0.02em; margin: 0 0 8px; }
h2 { font-size: 1.25rem; margin: 48px 0 4px; }
h3 { font-size: 0.95rem; margin: 0; font-weight: 600; }
p { margin: 4px 0 12px; } .lead { max-width: 46em; } .quiet { color: var(--quiet); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); gap: 14px;
  margin-top: 24px; }
.samples { display: grid; grid-template-columns: repeat(auto-fit, minmax(400px, 1fr)); gap: 14px;
  margin-top: 12px; }
.card { background: var(--card); border: 1px solid var(--line); border-top: 3px solid var(--k);
  border-radius: 8px; padding: 14px 16px; min-width: 0; }
.card p { margin: 0; font-size: 0.88rem; } .card h3 { color: var(--k); }
.card .big { font-size: 2rem; font-weight: 650; line-height: 1.35; letter-spacing: -0.02em;
  font-variant-numeric: tabular-nums; }
.card .big small { font-size: 0.85rem; font-weight: 400; color: var(--quiet); letter-spacing: 0; }
pre { margin: 8px 0 0; font: 12.5px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; max-height: 26em; overflow-y: auto; }
pre b { color: var(--quiet); font-weight: 400; }
figure { margin: 8px 0 0; background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; padding: 14px; }
figure + p { margin-top: 18px; }
figcaption { font-size: 0.82rem; color: var(--quiet); margin-bottom: 6px; }
.maps { display: grid; grid-template-columns: repeat(auto-fit, minmax(400px, 1fr)); gap: 14px;
  margin-top: 12px; }
.maps figure { margin: 6px 0 0; padding: 0; border: 0; } .maps figcaption { margin: 0; }
figure { overflow-x: auto; } figure > svg { min-width: 560px; }
.maps figure > svg { min-width: 0; }
svg { display: block; width: 100%; height: auto; } svg text { fill: var(--quiet); font-size: 12px; }
.maps svg text { font-size: 9px; }
.grid { stroke: var(--line); } .axis { stroke: var(--quiet); }
.level { stroke: var(--quiet); stroke-dasharray: 5 4; }
.curve { fill: none; stroke: var(--k); stroke-linejoin: round; }
.curve.faint { stroke-width: 1.2; opacity: 0.35; }
.dot { fill: var(--k); } .name text { fill: var(--k); font-weight: 600; }
.over { fill: var(--over); background: var(--over); }
.under { fill: var(--under); background: var(--under); }
.key { display: inline-block; width: 0.8em; height: 0.8em; border-radius: 2px;
  margin: 0 2px 0 8px; }
.wide { overflow-x: auto; margin-top: 8px; }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem;
  font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 6px 10px; border-bottom: 1px solid var(--line); }
th { font-weight: 500; color: var(--quiet); } th:first-child, td:first-child { text-align: left; }
.settings td { text-align: left; } .settings td:first-child { font-family: ui-monospace, monospace;
  white-space: nowrap; } .settings td:nth-child(2) { text-align: right; }
details { font-size: 0.9rem; } summary { cursor: pointer; color: var(--quiet); }
ul { columns: 2; font-size: 0.82rem; padding-left: 1.2em; overflow-wrap: anywhere; }
footer { margin-top: 56px; font-size: 0.82rem; color: var(--quiet); }
.c0, .k0 { --k: var(--c0); } .c1, .k1 { --k: var(--c1); } .c2, .k2 { --k: var(--c2); }
.c3, .k3 { --k: var(--c3); } .c4, .k4 { --k: var(--c4); } .c5, .k5 { --k: var(--c5); }
.c6, .k6 { --k: var(--c6); } .c7, .k7 { --k: var(--c7); }
@media (max-width: 480px) { .samples, .maps { grid-template-columns: 1fr; } ul { columns: 1; } }
)css";

}  // namespace cadre::train
