"""Speech recognition with CTC on synthetic speech: letters are pairs of tones of unknown length, in noise.

    spmdkit train configs/speech_ctc.yaml

An utterance is a spectrogram of three to eight letters. Each letter lasts three to seven frames, between silences of
unknown length. Every speaker has a pitch, and a sixth of the frames is lost. The network predicts a letter or blank for
each frame, and `optax.ctc_loss` sums over all alignments with the text.

Expected: 0.55 of new utterances read without an error. 0.6 minutes on two CPU cores.

Source: Graves et al., "Connectionist Temporal Classification" (2006).

Shape suffixes: B utterances, T frames, C channels of the spectrogram, D width, U letters, K letters and blank.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmdkit as sk

LETTERS = " abcdefgh"
"""The letter of each label; label 0 is blank."""
FRAMES, CHANNELS, MOST_LETTERS = 64, 20, 8
RULES = [(".*/up", [None, None, "mlp"]), (".*/down", ["mlp", None])]


def speak(random):
    """Returns one utterance: `sound` float32[T, C], `labels` int32[U], padded with zeros."""
    text = random.integers(1, len(LETTERS), random.integers(3, MOST_LETTERS + 1))
    pitch, sound, at = random.uniform(-1, 1), np.zeros((FRAMES, CHANNELS)), 0
    for label in text:
        first, last = at + random.integers(0, 2), at + random.integers(0, 2) + random.integers(3, 7)
        for tone in (2 + (label - 1) % 4 * 2, 12 + (label - 1) // 4 * 5):
            sound[first:last] += np.exp(-((np.arange(CHANNELS) - tone - pitch) ** 2) / 2)
        at = last
    sound[random.uniform(size=FRAMES) < 1 / 6] = 0
    sound += 0.3 * random.normal(size=sound.shape)
    return sound.astype(np.float32), np.pad(text, (0, MOST_LETTERS - len(text))).astype(np.int32)


def utterances(num, seed):
    random = np.random.default_rng(seed)
    sounds, labels = zip(*(speak(random) for _ in range(num)), strict=True)
    return {"sound": np.stack(sounds), "labels": np.stack(labels)}


def init_params(key, width, layers):
    keys = iter(jax.random.split(key, 2 + 2 * layers))
    weight = lambda *shape: jax.random.normal(next(keys), shape) / np.prod(shape[:-1]) ** 0.5
    layer = lambda: {"up": weight(3, width, 2 * width), "down": weight(2 * width, width)}
    inputs, blocks = weight(CHANNELS, width), [layer() for _ in range(layers)]
    return {"in": inputs, "layers": blocks, "out": weight(width, len(LETTERS))}


def logits(params, sound_BTC):
    """Returns the logits of a letter or blank at each frame, [B, T, K], by dilated convolutions."""
    x_BTD = sound_BTC @ params["in"]
    for number, w in enumerate(params["layers"]):
        wide_BTF = jax.lax.conv_general_dilated(
            jax.nn.standardize(x_BTD),
            w["up"],
            (1,),
            "SAME",
            rhs_dilation=(2**number,),
            dimension_numbers=("NTC", "TIO", "NTC"),
        )
        x_BTD += jax.nn.gelu(wide_BTF) @ w["down"]
    return jax.nn.standardize(x_BTD) @ params["out"]


def decode(scores_BTK):
    """Returns the labels [B, U]: the best of each frame, without repetitions and blanks."""
    best_BT = scores_BTK.argmax(-1)
    before_BT = jnp.pad(best_BT, ((0, 0), (1, 0)))[:, :-1]
    is_letter_BT = (best_BT != before_BT) & (best_BT > 0)
    place_BT = jnp.where(is_letter_BT, is_letter_BT.cumsum(-1) - 1, FRAMES)
    put = lambda best_T, place_T: jnp.zeros(FRAMES, jnp.int32).at[place_T].set(best_T, mode="drop")
    return jax.vmap(put)(best_BT.astype(jnp.int32), place_BT)[:, : MOST_LETTERS + 1]


def loss_fn(params, batch, key):
    scores_BTK, labels_BU = logits(params, batch["sound"]), batch["labels"]
    no_padding_BT = jnp.zeros(scores_BTK.shape[:2])
    loss_B = optax.ctc_loss(scores_BTK, no_padding_BT, labels_BU, (labels_BU == 0).astype(jnp.float32))
    is_right_B = (decode(scores_BTK) == jnp.pad(labels_BU, ((0, 0), (0, 1)))).all(-1)
    return sk.mean(loss_B), {"right": sk.mean(is_right_B)}


@sk.task
def task(width=48, layers=3, train=4096):
    """Returns the task; the arguments are the config's `task_args`."""
    return sk.Task(
        init=lambda key: init_params(key, width, layers),
        loss_fn=loss_fn,
        optimizer=optax.adam,
        train_data=utterances(train, 0),
        eval_data=utterances(512, 1),
        rules=RULES,
        unit="utterances",
    )
