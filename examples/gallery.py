"""Trains the examples of the gallery, draws their results to docs/gallery and writes docs/gallery.md.

    python examples/gallery.py [NAME ...]       # all without a name: ten minutes of processor time

docs/gallery/results.json has the measured numbers and samples. Needs the extras `examples` and `plot`.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import spmdkit as sk

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "gallery"
PAGE = ROOT / "docs" / "gallery.md"
BLUE, ORANGE = "#0072b2", "#d55e00"  # safe for color-blind readers


class Row(NamedTuple):
    """One example.

    Attributes:
        title: heading on the page.
        text: what the example shows.
        metric: the metric of its result, and what it is on the page.
        tolerance: largest difference of the metric between machines.
        short: overrides of a form of two steps.
        draw: `draw(result, figure)` draws on a figure of matplotlib, or returns a sample as text.
        size: of the picture, in inches; None without a picture.
        after: the config that is trained before.
        is_highest: the result is the highest value of the metric, which varies from step to step.
    """

    title: str
    text: str
    metric: tuple[str, str]
    tolerance: float
    short: tuple[str, ...]
    draw: Callable[..., str | None]
    size: tuple[float, float] | None = None
    after: str | None = None
    is_highest: bool = False


def train(name: str, folder: Path) -> tuple[sk.Result, float]:
    """Returns the result of a config and the minutes of processor time."""
    row, started = ROWS[name], time.process_time()
    overrides = [f"run_dir={folder / name}", "log.progress=off"]
    if row.after:
        sk.train(sk.load_config(ROOT / f"configs/{row.after}.yaml", [f"run_dir={folder / row.after}"]))
        overrides.append(f"init_from.path={folder / row.after}@best")
    result = sk.train(sk.load_config(ROOT / f"configs/{name}.yaml", overrides))
    return result, (time.process_time() - started) / 60


def measured(name: str, result: sk.Result) -> float:
    """Returns the metric of a result: of the last evaluation, or of the last step without one, or the highest."""
    metric = ROWS[name].metric[0]
    if ROWS[name].is_highest:
        return max(float(line[metric]) for line in result.history if metric in line)
    return float((result.evaluation or result.history[-1])[metric])


def params_of(result: sk.Result) -> Any:
    return jax.tree.map(jnp.asarray, jax.device_get(result.program.eval_params(result.state)))


# --- pictures and samples --------------------------------------------------------------------------------------------


def show_images(figure: Any, images: Any, titles: Sequence[str], columns: int) -> None:
    """Draws small gray images in rows."""
    rows = -(-len(images) // columns)
    for place, (image, title) in enumerate(zip(images, titles, strict=True), start=1):
        axes = figure.add_subplot(rows, columns, place)
        axes.imshow(image, cmap="gray_r", vmin=0, vmax=1)
        axes.set_title(title, fontsize=8, pad=2)
        axes.axis("off")


def draw_minimal_gpt(result: sk.Result, figure: Any) -> str:
    import minimal_gpt

    return minimal_gpt.sample(params_of(result), "    def ", 56)


def draw_vit(result: sk.Result, figure: Any) -> None:
    import vit_digits

    data = result.program.task.eval_data
    images, labels = data["images"][:20], data["labels"][:20]
    found = np.asarray(vit_digits.logits(params_of(result), images)).argmax(-1)
    titles = [f"{x}" if x == y else f"{x}, not {y}" for x, y in zip(found, labels, strict=True)]
    show_images(figure, images[..., 0], titles, 10)


def draw_diffusion(result: sk.Result, figure: Any) -> None:
    import diffusion_digits

    params = jax.tree.map(jnp.asarray, jax.device_get(result.state.ema))
    labels = np.tile(np.arange(10, dtype=np.int32), 3)
    drawn = np.asarray(diffusion_digits.sample(params, labels)).reshape(-1, 8, 8) / 2 + 0.5
    show_images(figure, drawn, [str(x) for x in labels[:10]] + [""] * 20, 10)


def draw_contrastive(result: sk.Result, figure: Any) -> None:
    import contrastive

    params, images = params_of(result), result.program.task.eval_data["images"][:128]
    left, right = np.split(images, 2, axis=2)
    a, b = (contrastive.encode(params[n], x.reshape(128, -1)) for n, x in (("left", left), ("right", right)))
    best = np.asarray(a @ b.T).argsort(-1)[:, ::-1]
    joined = [np.concatenate([left[i], np.full((8, 1, 1), 0.5), right[best[i, 0]]], 1)[..., 0] for i in range(16)]
    show_images(figure, joined, ["own half" if best[i, 0] == i else "" for i in range(16)], 8)


def draw_lora(result: sk.Result, figure: Any) -> str:
    import gpt

    params = params_of(result)
    adapters = params.pop("lora")
    before = gpt.sample(params, "DEF ", 60, 64)
    for name, pair in adapters.items():
        params["blocks"][name] += 4.0 * jnp.einsum("ldr,lrnh->ldnh", pair["a"], pair["b"])
    return f"without adapters: {before!r}\nwith adapters:    {gpt.sample(params, 'DEF ', 60, 64)!r}"


def draw_recurrent(result: sk.Result, figure: Any) -> str:
    import recurrent

    params, text = params_of(result), b"def "

    @jax.jit
    def next_byte(tokens_T: jax.Array, last: jax.Array, key: jax.Array) -> jax.Array:
        x_BTD = params["embed"][tokens_T[None]]
        for layer in range(len(params["blocks"]["bias"])):
            x_BTD = recurrent.block_part(x_BTD, jax.tree.map(lambda w, i=layer: w[i], params["blocks"]))
        scores_V = (recurrent.rms_norm(x_BTD, params["norm"]) @ params["head"])[0, last]
        return jax.random.categorical(key, scores_V / 0.7)

    for key in jax.random.split(jax.random.key(0), 60):
        tokens_T = np.frombuffer(text.ljust(64, b"\0"), np.uint8).astype(np.int32)
        text += bytes([int(next_byte(tokens_T, np.int32(len(text) - 1), key))])
    return text.decode(errors="replace")


def draw_ppo(result: sk.Result, figure: Any) -> None:
    history = [line for line in result.history if "return" in line]
    axes = figure.add_subplot()
    axes.plot([line["step"] for line in history], [line["return"] for line in history], color=BLUE, marker="o", ms=3)
    axes.axhline(500, color=ORANGE, linestyle="--", linewidth=1)
    axes.text(1, 480, "limit", fontsize=8, va="top")
    axes.set(xlabel="update", ylabel="mean return", ylim=(0, 520))


def draw_pinn(result: sk.Result, figure: Any) -> None:
    import pinn

    x, t = np.meshgrid(np.linspace(0, 1, 48, dtype=np.float32), np.linspace(0, 1, 48, dtype=np.float32))
    mean = jnp.asarray(jax.device_get(result.state.model_state["mean"]))
    layers = params_of(result)["layers"]
    found = jax.vmap(lambda x, t: pinn.solution(layers, mean, x, t))(x.ravel(), t.ravel()).reshape(x.shape)
    for place, (title, field) in enumerate([("u", found), ("error", np.abs(found - pinn.exact(x, t)))], start=1):
        axes = figure.add_subplot(1, 2, place)
        drawn = axes.imshow(field, origin="lower", extent=(0, 1, 0, 1), cmap="cividis")
        axes.set(xlabel="x", ylabel="t", title=title)
        figure.colorbar(drawn, ax=axes, shrink=0.8)


def draw_graph(result: sk.Result, figure: Any) -> None:
    import graph_network

    graph = {name: x[0] for name, x in result.program.task.eval_data.items()}
    found = graph_network.distances(params_of(result), graph, 6)
    reached = graph["is_reached"]
    limit = graph["distance"].max()
    for place, (title, values) in enumerate([("distance", graph["distance"]), ("predicted", found)], start=1):
        axes = figure.add_subplot(1, 2, place)
        for i, j in zip(graph["senders"], graph["receivers"], strict=True):
            if i < graph_network.NODES:
                axes.plot(*graph["points"][[i, j]].T, color="0.8", linewidth=0.6, zorder=1)
        points = graph["points"][reached]
        dots = axes.scatter(*points.T, c=np.asarray(values)[reached], cmap="cividis", vmin=0, vmax=limit, s=30)
        axes.scatter(*graph["points"][:1].T, marker="*", s=120, color=ORANGE)
        axes.set_title(title)
        axes.axis("off")
    figure.colorbar(dots, ax=figure.axes, shrink=0.8)


def draw_speech(result: sk.Result, figure: Any) -> None:
    import speech_ctc

    data = result.program.task.eval_data
    scores = speech_ctc.logits(params_of(result), data["sound"][:2])
    text = lambda labels: "".join(speech_ctc.LETTERS[i] for i in np.asarray(labels) if i)
    for place, (sound, labels, read) in enumerate(
        zip(data["sound"][:2], data["labels"][:2], speech_ctc.decode(scores), strict=True), start=1
    ):
        axes = figure.add_subplot(1, 2, place)
        axes.imshow(sound.T, origin="lower", aspect="auto", cmap="cividis")
        axes.set_title(f"text {text(labels)}, read as {text(read)}", fontsize=9)
        axes.set(xlabel="frame", ylabel="channel")


SHORT = ("steps=2", "eval.every_steps=null", "log.every_steps=1")
TEXT = "train_bytes: 20000, eval_bytes: 2000"
ROWS = {
    "minimal_gpt": Row(
        "A GPT in a hundred lines",
        "Plain JAX on every replica, fsdp and tensor mesh.",
        ("loss", "nats per byte of text that was not trained on"),
        0.05,
        (*SHORT, "task_args={width: 16, layers: 1, heads: 2, context: 8, max_bytes: 9000}"),
        draw_minimal_gpt,
    ),
    "vit_digits": Row(
        "A vision transformer",
        "Digits as sixteen patches. The heads and the MLPs are sharded over two devices.",
        ("accuracy", "accuracy on held-out digits"),
        0.03,
        (*SHORT, "task_args={width: 16, layers: 1, heads: 2}"),
        draw_vit,
        (6, 1.6),
    ),
    "diffusion_digits": Row(
        "Diffusion",
        "New digits of a given class, drawn with the moving average of the parameters.",
        ("loss", "mean squared error on held-out digits"),
        0.03,
        (*SHORT, "task_args={width: 16, layers: 1}"),
        draw_diffusion,
        (6, 2.2),
    ),
    "contrastive": Row(
        "Contrastive learning",
        "Each left half of a digit looks for its own right half among those of 128 digits.",
        ("found", "share of held-out digits with the own half first; 0.008 by chance"),
        0.04,
        (*SHORT, "task_args={width: 16, dim: 8}"),
        draw_contrastive,
        (6, 1.9),
    ),
    "lora": Row(
        "LoRA",
        "Adapters of rank 4 on a GPT that is trained first. Its parameters stay; the text is in capital letters.",
        ("loss", "nats per byte of text in capital letters"),
        0.1,
        (),
        draw_lora,
        after="lora_pretrain",
    ),
    "ppo_cartpole": Row(
        "Reinforcement learning",
        "PPO on CartPole. The environments run in the compiled step, sharded over four devices.",
        ("return", "highest mean return of finished episodes; the limit is 500"),
        20,
        ("steps=2", "log.every_steps=1", "task_args={envs: 8, moves: 4, epochs: 1, width: 8}"),
        draw_ppo,
        (6, 2.4),
        is_highest=True,
    ),
    "pinn": Row(
        "A physics-informed network",
        "The heat equation, from derivatives with respect to the inputs.",
        ("error", "mean error; the solution is between 0 and 1"),
        0.01,
        (*SHORT, "task_args={width: 8, num_points: 256}"),
        draw_pinn,
        (6, 2.4),
    ),
    "recurrent": Row(
        "A recurrent language model",
        "Linear recurrences; the sequence, the channels and the weights are sharded.",
        ("loss", "nats per byte of text that was not trained on"),
        0.05,
        (*SHORT, f"task_args={{width: 16, layers: 2, context: 16, {TEXT}}}"),
        draw_recurrent,
    ),
    "graph_network": Row(
        "A graph network",
        "Distances from a source (the star) along the edges of a random graph.",
        ("error", "mean error of the distances in new graphs"),
        0.02,
        (*SHORT, "batch_size=8", "task_args={width: 8, rounds: 2, graphs: 16}"),
        draw_graph,
        (6, 2.4),
    ),
    "speech_ctc": Row(
        "Speech recognition",
        "Synthetic speech of letters with unknown lengths, read by CTC.",
        ("right", "share of new utterances without an error"),
        0.05,
        (*SHORT, "batch_size=8", "task_args={width: 8, layers: 1, train: 16}"),
        draw_speech,
        (6, 2.2),
    ),
}


# --- the page --------------------------------------------------------------------------------------------------------


def section(name: str, result: dict[str, Any]) -> str:
    """Returns the part of the page about one example."""
    row = ROWS[name]
    shown = f"```text\n{result['sample'].rstrip()}\n```" if row.size is None else f"![{row.title}](gallery/{name}.png)"
    links = f"[examples/{name}.py](../examples/{name}.py),\n[configs/{name}.yaml](../configs/{name}.yaml)"
    return f"""## {row.title}

{row.text}
{links}.

- Result: {result["value"]:.3g}, {row.metric[1]}.
- Time: {result["minutes"]:.1f} minutes of processor time on two CPU cores.

{shown}
"""


def page(results: dict[str, Any]) -> str:
    """Returns docs/gallery.md."""
    head = """# Gallery

Small examples to copy and change. Each is one file of at most 150 lines with a config that trains it on a CPU in
minutes. The same file trains on GPUs and TPUs: remove `devices` from the config.

`python examples/gallery.py` trains all of them again, draws the pictures and writes this page. Seeds are fixed. Another
version of JAX or Python may change the last digits.
"""
    return "\n".join([head, *(section(name, results[name]) for name in ROWS if name in results)])


def main(*names: str) -> None:
    from matplotlib.figure import Figure

    FOLDER.mkdir(exist_ok=True)
    file = FOLDER / "results.json"
    for name in names or ROWS:
        row = ROWS[name]
        with tempfile.TemporaryDirectory() as folder:
            result, minutes = train(name, Path(folder))
            figure = Figure(figsize=row.size or (1, 1), dpi=100, layout="constrained")
            sample = row.draw(result, figure)
            if row.size:
                figure.savefig(FOLDER / f"{name}.png", metadata={"Software": None})
            results = json.loads(file.read_text()) if file.exists() else {}
            results[name] = {"value": measured(name, result), "minutes": round(minutes, 2), "sample": sample}
        print(name, results[name])
        file.write_text(json.dumps(results, indent=1) + "\n")
        PAGE.write_text(page(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
