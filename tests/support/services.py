"""Tracking services in tests: the real packages, where they are installed, or small substitutes; and their readers."""

import json
import struct
import sys
import time
import types
import zipfile
from pathlib import Path

import pytest

SERVICES = {"wandb": {"mode": "offline"}, "mlflow": {}, "comet": {"mode": "offline"}}
"""Name -> the options with which it needs no network."""


def installed(name, is_real, monkeypatch):
    """Uses the real package, or skips the test; or uses a substitute."""
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    if is_real:
        for package in {"wandb": ["wandb"], "mlflow": ["mlflow.tracking", "sqlalchemy"], "comet": ["comet_ml"]}[name]:
            pytest.importorskip(package)
        return
    for module, attributes in {"wandb": WANDB, "mlflow": MLFLOW, "comet": COMET}[name].items():
        substitute = types.ModuleType(module)
        vars(substitute).update(attributes)
        monkeypatch.setitem(sys.modules, module, substitute)


def rows(name, is_real, folder):
    """Returns (name, step, value) of a run's directory, as a reader of the service sees them."""
    return ({"wandb": _wandb, "mlflow": _mlflow, "comet": _comet}[name] if is_real else _substitute)(folder)


def read(name, is_real, folder):
    """Returns the rows of scalars."""
    return [row for row in rows(name, is_real, folder) if isinstance(row[2], float | int)]


def shown(name, is_real, folder):
    """Returns the names that a reader sees, of any kind."""
    return {row[0] for row in rows(name, is_real, folder)}


# ---- the real services -----------------------------------------------------------------------------------------------


def _wandb(folder):
    """Reads the files of offline runs, each once its process has written the last record."""
    rows = []
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for _ in range(300):
            records = list(_records(path))
            if any(record.HasField("exit") for record in records):
                break
            time.sleep(0.1)
        for record in records:
            items = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
            step = int(items.get("_step", 0))
            rows += [(key, step, value) for key, value in items.items() if not key.startswith("_")]
    return [(key.removesuffix("/_type"), step, value) for key, step, value in rows if _is_wanted(key)]


def _records(path):
    """Yields records of protobuf, in blocks of 32 KiB as in LevelDB's log."""
    from wandb.proto import wandb_internal_pb2

    content, position, part = path.read_bytes(), 7, b""
    while position + 7 <= len(content):
        if (left := 32768 - position % 32768) < 7:
            position += left
            continue
        _, size, kind = struct.unpack_from("<IHB", content, position)
        chunk = content[position + 7 : position + 7 + size]
        position, part = position + 7 + size, chunk if kind in (1, 2) else part + chunk
        if kind in (1, 4) and len(chunk) == size:
            yield wandb_internal_pb2.Record.FromString(part)


def _is_wanted(key):
    return key.endswith("/_type") or key.count("/") == 1


def _mlflow(folder):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder.parent / 'mlflow.db'}")
    run = client.get_run(json.loads((folder / "trackers/mlflow.json").read_text())["id"])
    history = {key: client.get_metric_history(run.info.run_id, key) for key in run.data.metrics}
    rows = [(key, point.step, point.value) for key, points in history.items() for point in points]
    rows += [(f"param {key}", 0, value) for key, value in run.data.params.items()]
    artifacts = [
        item.path
        for top in client.list_artifacts(run.info.run_id)
        for item in [top, *client.list_artifacts(run.info.run_id, top.path)]
    ]
    return rows + [(path, 0, "artifact") for path in artifacts]


def _comet(folder):
    """Reads the archives of offline experiments."""
    rows = []
    for path in sorted(folder.glob("comet/*.zip"), key=lambda path: path.stat().st_mtime_ns):
        for line in zipfile.ZipFile(path).read("messages.json").decode().splitlines():
            message = json.loads(line)
            payload, kind = message["payload"], message["type"]
            if kind == "metric_msg" and payload["metric"]["metricName"] != "process duration":
                metric = payload["metric"]
                rows.append((metric["metricName"], metric["step"], metric["metricValue"]))
            elif kind == "parameter_msg":
                rows.append((f"param {payload['param']['paramName']}", 0, str(payload["param"]["paramValue"])))
            elif kind == "file_upload":
                asset = payload["additional_params"]
                name = asset.get("figName") or (payload["metadata"] or {}).get("name") or asset["fileName"]
                rows.append((f"{asset.get('groupingName') or ''} {name}", asset["step"], payload["upload_type"]))
    return rows


# ---- the substitutes -------------------------------------------------------------------------------------------------


class Store:
    """Rows of a service in a file of JSON lines."""

    def __init__(self, path):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, *row):
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def _substitute(folder):
    files = [*folder.glob("wandb/rows"), *folder.glob("comet/rows"), *folder.parent.glob("mlflow.db")]
    return [tuple(json.loads(line)) for file in files for line in file.read_text().splitlines()]


class _WandbRun:
    def __init__(self, **options):
        self.store = Store(Path(options["dir"]) / "wandb/rows")
        self.store.add(f"id {options['id']}", 0, "run")
        for key in options["config"]:
            self.store.add(f"config {key}", 0, "config")

    def log(self, values, step):
        for key, value in values.items():
            self.store.add(key, step, value)

    def log_artifact(self, artifact):
        self.store.add(f"artifact {artifact.type}", artifact.metadata["step"], "artifact")

    def finish(self):
        self.store.add("finished", 0, "run")


class _Artifact:
    def __init__(self, name, type, metadata):
        self.type, self.metadata = type, metadata

    def add_dir(self, path):
        assert Path(path, "record.json").is_file()


_text = lambda value, **_: str(type(value))
WANDB = {
    "wandb": dict.fromkeys(("Image", "Histogram", "Audio", "Html"), _text)
    | {"init": _WandbRun, "Artifact": _Artifact, "Settings": dict}
}


class _Client:
    def __init__(self, tracking_uri):
        self.store, self.params = Store(tracking_uri.removeprefix("sqlite:///")), {}

    def get_experiment_by_name(self, name):
        return None

    def create_experiment(self, name, artifact_location):
        return "1"

    def create_run(self, experiment, run_name):
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="r1"))

    def update_run(self, run_id, status):
        self.store.add(f"id {run_id}", 0, status)

    def get_run(self, run_id):
        return types.SimpleNamespace(data=types.SimpleNamespace(params=self.params))

    def log_batch(self, run_id, metrics=(), params=()):
        for key, value, _, step in metrics:
            self.store.add(key, step, value)
        for key, value in params:
            self.store.add(f"param {key}", 0, value)

    def set_tag(self, run_id, key, value):
        self.store.add(f"tag {key}", 0, value)

    def log_text(self, run_id, text, path):
        self.store.add(path, 0, text)

    def log_image(self, run_id, image, key, step):
        self.store.add(key, step, str(image.dtype))

    def log_artifacts(self, run_id, path, name):
        self.store.add(name, 0, "artifact")

    def set_terminated(self, run_id):
        self.store.add("finished", 0, "run")


MLFLOW = {
    "mlflow": {},
    "mlflow.tracking": {"MlflowClient": _Client},
    "mlflow.entities": {"Metric": lambda *values: values, "Param": lambda *values: values},
}


class _CometExperiment:
    def __init__(self, experiment_key, experiment_config, **_):
        self.store = Store(Path(experiment_config["offline_directory"]) / "rows")
        self.store.add(f"id {experiment_key}", 0, "run")

    def log_parameters(self, values):
        for key, value in values.items():
            self.store.add(f"param {key}", 0, str(value))

    def log_metrics(self, values, step):
        for key, value in values.items():
            self.store.add(key, step, value)

    def log_text(self, value, step, metadata):
        self.store.add(metadata["name"], step, value)

    def log_image(self, value, name, step, image_minmax):
        self.store.add(name, step, str(value.dtype))

    def log_histogram_3d(self, value, name, step):
        self.store.add(name, step, str(value.shape))

    def log_audio(self, value, sample_rate, file_name, step):
        self.store.add(file_name, step, str(sample_rate))

    def log_model(self, name, path, metadata):
        assert Path(path, "record.json").is_file()
        self.store.add(name, metadata["step"], "artifact")

    def end(self):
        self.store.add("finished", 0, "run")


COMET = {"comet_ml": {"start": _CometExperiment, "ExperimentConfig": dict, "get_config": lambda _: None}}
