"""What lies in deploy/ names flags, paths and ports that the program has."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from lmcache_persist import config
from lmcache_persist.cli.exit_codes import ExitCode
from lmcache_persist.config import Settings
from lmcache_persist.units import parse_size
from support.command_line import parse_verb
from support.connector_settings import read_extra_config

DEPLOY = Path(__file__).parents[2] / "deploy"
UNIT = DEPLOY / "systemd" / "lmcache-persist.service"


@pytest.fixture(autouse=True)
def _groups_of_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """The groups that the files name exist where they are installed, not here."""
    monkeypatch.setattr(config.grp, "getgrgid", lambda number: number)
    monkeypatch.setattr(config.grp, "getgrnam", lambda name: name)


def settings_of(argv: list[str], env: Mapping[str, str] | None = None) -> Settings:
    """What ``serve`` would run with, read by its own command line."""
    verb, flags = parse_verb(argv)
    assert verb == "serve", argv
    return Settings.load(flags, env=env or {})


def unit() -> configparser.ConfigParser:
    """The systemd unit."""
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNIT.read_text())
    return parser


def of_unit(tmp_path: Path) -> Settings:
    """The settings of the unit, with the file that is delivered beside it."""
    command = unit()["Service"]["ExecStart"]
    beside = tmp_path / "lmcache-persist.yaml"
    shutil.copy(UNIT.with_suffix(".yaml"), beside)
    return settings_of(shlex.split(command.replace("/etc/lmcache-persist.yaml", str(beside)))[1:])


def test_the_unit_starts_a_server_in_its_state_directory(tmp_path: Path) -> None:
    """Data dir, group and stop time of the command line are those of the unit."""
    service, found = unit()["Service"], of_unit(tmp_path)
    assert found.data_dir == Path("/var/lib") / service["StateDirectory"]
    assert found.group == service["Group"]
    assert int(service["TimeoutStopSec"]) >= found.shutdown_timeout_s + 10
    assert f"u {service['User']} " in (UNIT.with_suffix(".sysusers")).read_text()


def test_the_unit_does_not_repeat_a_start_that_was_refused() -> None:
    """Refusals end the unit, whatever else fails is tried again, a bounded number of times."""
    refusals = {int(code) for code in unit()["Service"]["RestartPreventExitStatus"].split()}
    assert refusals == {ExitCode.REFUSED_INPUT, ExitCode.DATA_DIR}
    assert unit()["Service"]["Restart"] == "on-failure"
    assert int(unit()["Unit"]["StartLimitBurst"]) > 1


def test_the_unit_hides_nothing_that_the_server_reads() -> None:
    """A private user, /proc without its files, an own shared memory, no setgid would break it."""
    service = unit()["Service"]
    assert "DynamicUser" not in service
    assert service.get("ProcSubset", "all") == "all"
    forbidden = {"PrivateIPC", "InaccessiblePaths", "TemporaryFileSystem", "RestrictSUIDSGID"}
    assert not forbidden & set(service)


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """``systemd-analyze verify`` has nothing to say."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/usr/local/bin/lmcache-persist", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def container() -> dict[str, Any]:
    """The container file: its last values by instruction, its environment by name."""
    text = (DEPLOY / "container" / "Containerfile").read_text().replace("\\\n", " ")
    found: dict[str, Any] = {}
    for line in text.splitlines():
        word, _, rest = line.partition(" ")
        if word and not word.startswith("#"):
            found[word] = rest.strip()
    found["ENV"] = dict(pair.split("=", 1) for pair in shlex.split(found["ENV"]))
    return found


def container_settings() -> Settings:
    """What the image's entry point runs with."""
    file = container()
    assert json.loads(file["ENTRYPOINT"]) == ["lmcache-persist"]
    env = {key: value for key, value in file["ENV"].items() if key.startswith("LMCACHE_PERSIST_")}
    return settings_of(json.loads(file["CMD"]), env)


def test_the_container_serves_its_volume_as_a_user_of_its_own() -> None:
    """The environment is that of a server; nothing runs as root; the volume is the data dir."""
    file, found = container(), container_settings()
    assert found.data_dir == Path(file["VOLUME"])
    assert file["USER"] == f"{found.group}:{found.group}"
    assert str(found.data_dir) in file["RUN"] and str(found.pool_dir) in file["RUN"]
    assert found.listen == f"ipc://{found.pool_dir}/server.sock"
    assert file["STOPSIGNAL"] == "SIGTERM"


def test_the_container_probes_the_page_that_it_serves() -> None:
    """The health check is valid Python and asks the address of --http."""
    options, _, command = container()["HEALTHCHECK"].partition("CMD ")
    code = json.loads(command)[2]
    compile(code, "healthcheck", "exec")
    assert f"http://{container_settings().http}/healthz" in code
    assert "--start-period" in options


def test_the_container_installs_what_the_package_needs_and_no_torch() -> None:
    """What is copied is what a build of the package reads."""
    text = (DEPLOY / "container" / "Containerfile").read_text()
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE)
    ignored = (DEPLOY / "container" / "Containerfile.dockerignore").read_text().split()
    for name in " ".join(copied).split():
        assert (DEPLOY.parent / name).exists(), name
        assert f"!{name}" in ignored, name
    assert "/src[" not in text  # no extra: they bring torch


def pods() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Of the Kubernetes example: the DaemonSet, its pod's spec, the engine's spec."""
    text = (DEPLOY / "kubernetes" / "daemonset.yaml").read_text()
    daemons, engine = yaml.safe_load_all(text)
    return daemons, daemons["spec"]["template"]["spec"], engine["spec"]


def mounts(spec: dict[str, Any], container: dict[str, Any]) -> dict[str, str]:
    """Host paths of a container by where it sees them."""
    hosts = {
        volume["name"]: volume["hostPath"]["path"]
        for volume in spec["volumes"]
        if "hostPath" in volume
    }
    return {
        mount["mountPath"]: hosts[mount["name"]]
        for mount in container["volumeMounts"]
        if mount["name"] in hosts
    }


def test_the_pods_share_the_pool_and_the_socket() -> None:
    """Server and engine see one folder of shared memory under one path, and connect there."""
    _, server, engine = pods()
    found = settings_of(server["containers"][0]["args"])
    shared = str(found.pool_dir)
    here, there = (mounts(spec, spec["containers"][0]) for spec in (server, engine))
    assert here[shared] == there[shared]
    assert here[shared].startswith("/dev/shm/")
    assert str(found.data_dir) in here
    assert str(found.data_dir) not in there  # an engine touches the pool only
    flag, transfer = engine["containers"][0]["args"]
    assert flag == "--kv-transfer-config"
    extra = json.loads(transfer)["kv_connector_extra_config"]
    assert read_extra_config(extra).server == found.listen
    assert found.listen.startswith(f"ipc://{shared}/")


def test_the_pods_need_no_namespace_of_the_host() -> None:
    """Clients are watched by file locks: neither process ids nor IPC of the host are needed."""
    for spec in pods()[1:]:
        assert not {"hostPID", "hostIPC", "hostNetwork"} & set(spec)


def test_the_pods_agree_about_user_and_group() -> None:
    """The group of the server's flag is the one it runs as, that owns the folders and engines."""
    _, server, engine = pods()
    one = server["containers"][0]
    gid = int(settings_of(one["args"]).group or 0)
    assert one["securityContext"]["runAsGroup"] == gid
    assert one["securityContext"]["runAsNonRoot"] is True
    assert engine["securityContext"]["supplementalGroups"] == [gid]
    prepare = server["initContainers"][0]["command"]
    assert prepare[:6] == ["install", "-d", "-o", str(gid), "-g", str(gid)]
    assert set(prepare[8:]) == set(mounts(server, one))


def test_the_probes_ask_pages_that_the_server_has() -> None:
    """Port and path are served; readiness does not wait for an engine."""
    _, server, _ = pods()
    one = server["containers"][0]
    ports = {port["name"]: port["containerPort"] for port in one["ports"]}
    assert f":{ports['http']}" in str(settings_of(one["args"]).http)
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert one[probe]["httpGet"] == {"path": "/healthz", "port": "http"}
    annotations = pods()[0]["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(ports["http"])
    assert annotations["prometheus.io/path"] == "/metrics"


def test_the_pod_has_time_to_stop_and_room_for_its_pool() -> None:
    """The grace period outlasts the flush, one server at a time, memory holds the pool."""
    daemons, server, _ = pods()
    one = server["containers"][0]
    found = settings_of(one["args"])
    assert server["terminationGracePeriodSeconds"] >= found.shutdown_timeout_s + 10
    assert daemons["spec"]["updateStrategy"]["rollingUpdate"]["maxSurge"] == 0
    memory = parse_size(one["resources"]["limits"]["memory"] + "B")
    assert memory >= found.pool_size_bytes + (2 << 30)
