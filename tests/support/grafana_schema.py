"""Grafana's own types of a dashboard (npm's @grafana/schema), and a compiler that holds JSON against them.

Grafana itself is in no registry that tests are installed from. Unknown fields and values of a wrong type are what an
import of a dashboard would pass over in silence.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from debian import cannot_run, install_under_ci

PACKAGES = ("@grafana/schema@13.2.3", "typescript@5.9.3")
FOLDER = Path(__file__).parents[2] / ".venv" / "sdk" / "grafana"
_RAW = "./node_modules/@grafana/schema/dist/types/raw"
_HEAD = f"""\
import type * as g from '{_RAW}/dashboard/x/types.gen';
import type {{Options as Stat}} from '{_RAW}/composable/stat/panelcfg/x/types.gen';
import type {{Options as TimeSeries, FieldConfig as Field}} from '{_RAW}/composable/timeseries/panelcfg/x/types.gen';
// enums by their values, as JSON has them
type Plain<T> = T extends string ? `${{T}}` : T extends object ? {{[K in keyof T]: Plain<T[K]>}} : T;
// Grafana fills in what a panel leaves out
type Some<T> = T extends object ? {{[K in keyof T]?: Some<T[K]>}} : T;
type Target = {{refId: string, datasource: g.DataSourceRef, expr: string, legendFormat?: string}};
type Defaults<C> = Omit<g.FieldConfig, 'custom'> & {{custom?: Some<C>}};
type Panel<O, C> = Omit<g.Panel, 'options' | 'fieldConfig' | 'targets'> & {{
  options: Some<O>, targets: Target[],
  fieldConfig: {{defaults: Defaults<C>, overrides: g.FieldConfigSource['overrides']}},
}};
"""
_PANELS = {"stat": "Panel<Stat, {}>", "timeseries": "Panel<TimeSeries, Field>"}


def installed() -> Path:
    """The folder with both packages; skips the test where they cannot be had."""
    if shutil.which("npm") is None:
        install_under_ci("npm")
    if shutil.which("npm") is None:
        cannot_run("there is no npm here")
    ready = FOLDER / ".ready"
    if not ready.exists() or ready.read_text() != "\n".join(PACKAGES):
        FOLDER.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(FOLDER), *PACKAGES]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            cannot_run(f"npm cannot install {', '.join(PACKAGES)}: {done.stderr.strip()[-300:]}")
        ready.write_text("\n".join(PACKAGES))
    return FOLDER


def complaints(dashboard: dict[str, Any]) -> list[str]:
    """What of a dashboard is not as Grafana's types have it; one line each."""
    folder, parts = installed(), [_HEAD]
    for index, panel in enumerate(dashboard["panels"]):
        parts.append(f"export const panel{index}: Plain<{_PANELS[panel['type']]}> = {json.dumps(panel)};\n")
    rest = {key: value for key, value in dashboard.items() if key != "panels"}
    parts.append(f"export const rest: Plain<Omit<g.Dashboard, 'panels'>> = {json.dumps(rest)};\n")
    source = folder / "dashboard.ts"
    source.write_text("".join(parts))
    options = ["--noEmit", "--strict", "--skipLibCheck", "--target", "es2022", "--module", "commonjs"]
    command = [str(folder / "node_modules" / ".bin" / "tsc"), *options, "--moduleResolution", "node10", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=folder)
    said = [line for line in done.stdout.splitlines() if "error TS" in line]
    assert bool(said) == bool(done.returncode), done.stdout + done.stderr
    return said
