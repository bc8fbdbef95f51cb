"""The files in deploy/ pass the checks of the tools that read them, if these are installed, and name only options and
metrics that the server has."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest

from onward.cli.commands.serve import Options
from onward.cli.shared.options import parse
from onward.serving import RequestLimits, Service, make_app

DEPLOY = Path(__file__).parents[2] / "deploy"
CHECKS = {
    "hadolint": "hadolint Dockerfile",
    "promtool rules": "promtool check rules prometheus/rules.yml",
    "promtool tests": "promtool test rules prometheus/rules_test.yml",
    "promtool config": "promtool check config --syntax-only prometheus/prometheus.yml",
    "kubernetes": "kubernetes-validate --strict -k 1.33 kubernetes.yaml",
}


@pytest.mark.parametrize("name", CHECKS)
def test_a_file_passes_its_linter(name: str) -> None:
    words = CHECKS[name].split()
    if not shutil.which(words[0]):
        pytest.skip(f"{words[0]} is not installed")
    done = subprocess.run(words, cwd=DEPLOY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_unit_passes_systemd(tmp_path: Path) -> None:
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze is not installed")
    text = (DEPLOY / "onward.service").read_text()
    unit = tmp_path / "onward.service"
    unit.write_text(text.replace("/opt/onward/bin/onward", shutil.which("true") or ""))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "onward.service" not in done.stderr


def test_a_dashboard_and_rules_name_only_metrics_of_the_server() -> None:
    service = Service(RequestLimits())
    registry = make_app(service).state.metrics.registry
    service.close()
    known = {line.split()[2] for line in generate_latest(registry).decode().splitlines() if line.startswith("# TYPE")}
    known |= {f"{name}_bucket" for name in known}
    rules = yaml.safe_load((DEPLOY / "prometheus/rules.yml").read_text())["groups"][0]["rules"]
    known |= {rule["record"] for rule in rules if "record" in rule}
    panels = json.loads((DEPLOY / "grafana/onward.json").read_text())["panels"]
    queries = [rule["expr"] for rule in rules] + [target["expr"] for panel in panels for target in panel["targets"]]
    named = {name for query in queries for name in re.findall(r"(?:vllm|onward):[\w:]+", query)}
    assert len(named) > 10
    assert named <= known, named - known


def commands() -> dict[str, list[str]]:
    """The arguments of `onward serve` in each file."""
    compose: Any = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    kubernetes: Any = next(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    docker = (DEPLOY / "Dockerfile").read_text()
    unit = (DEPLOY / "onward.service").read_text()
    return {
        "Dockerfile": json.loads(re.findall(r"^CMD (.*)$", docker, re.MULTILINE)[0]),
        "compose.yaml": compose["services"]["onward"]["command"],
        "kubernetes.yaml": kubernetes["spec"]["template"]["spec"]["containers"][0]["args"],
        "onward.service": re.findall(r"^ExecStart=\S+ serve (.*)$", unit, re.MULTILINE)[0].split(),
    }


@pytest.mark.parametrize("name", commands())
def test_a_command_has_options_of_the_server(name: str) -> None:
    options = parse(Options, commands()[name], prog="onward serve", about="")
    assert options.models
    assert name == "Dockerfile" or options.api_key_file


def test_files_that_are_mounted_or_copied_exist() -> None:
    compose: Any = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    mounts = [one.split(":")[0] for service in compose["services"].values() for one in service.get("volumes", [])]
    assert all((DEPLOY / mount).exists() for mount in mounts if not mount.startswith("$"))
    copied = re.findall(r"^COPY (?!--)(.+) \S+$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert all((DEPLOY.parent / name).exists() for names in copied for name in names.split())
    ignored = (DEPLOY.parent / ".dockerignore").read_text()
    assert all(f"!{name}\n" in ignored for names in copied for name in names.split())


def test_probes_ask_paths_that_need_no_key() -> None:
    from onward.serving.guard import PUBLIC

    kubernetes: Any = next(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    [container] = kubernetes["spec"]["template"]["spec"]["containers"]
    paths = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")}
    assert paths == {"startup": "/health", "liveness": "/health", "readiness": "/ready"}
    assert {*paths.values()} <= PUBLIC
