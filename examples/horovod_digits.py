"""Horovod's `examples/pytorch/pytorch_mnist.py` ported to JAX, on the handwritten digits of scikit-learn instead of
MNIST.

    spmdkit launch -n 2 -- examples/horovod_digits.py --epochs 5

Every call of `hvd` is unchanged: name, arguments, order. The code around them is JAX: parameters and optimizer state
are values that the loop passes on, the gradient is that of a jitted function, and dropout draws from a key for each
example, so that any number of ranks drops the same values. For a new program see digits_cnn.py, with a step that
reduces inside one compiled program.

Source: horovod/horovod, examples/pytorch/pytorch_mnist.py at 2626dc8.
Shape suffixes: B examples of this rank, H height, W width, C channels, K the 10 classes.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmdkit.horovod as hvd

NUM_TRAIN = 1440
Params = dict[str, jax.Array]

parser = argparse.ArgumentParser(description="Digits with the Horovod API, in JAX")
parser.add_argument("--batch-size", type=int, default=64, metavar="N", help="examples of each rank in a step")
parser.add_argument(
    "--test-batch-size", type=int, default=1000, metavar="N", help=("examples of each rank in a test step")
)
parser.add_argument("--epochs", type=int, default=10, metavar="N", help="number of epochs to train")
parser.add_argument("--lr", type=float, default=0.01, metavar="LR", help="learning rate of one rank")
parser.add_argument("--momentum", type=float, default=0.5, metavar="M", help="SGD momentum")
parser.add_argument("--no-cuda", action="store_true", help="leaves GPUs alone")
parser.add_argument("--seed", type=int, default=42, metavar="S", help="seed of parameters, order and dropout")
parser.add_argument("--log-interval", type=int, default=10, metavar="N", help="steps between two log lines")
parser.add_argument("--fp16-allreduce", action="store_true", help="sends gradients as float16")
parser.add_argument(
    "--use-mixed-precision", action="store_true", help="computes in bfloat16, which needs no loss scale"
)
parser.add_argument("--use-adasum", action="store_true", help="combines updates by Adasum")
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0, help="divides gradients before the sum")


class Net:
    """Two convolutions and two dense layers, with parameters by torch's names."""

    def __init__(self, seed: int):
        shapes = {"conv1": (3, 3, 1, 10), "conv2": (3, 3, 10, 20), "fc1": (80, 50), "fc2": (50, 10)}
        self.params: Params = {}
        for key, (name, shape) in zip(jax.random.split(jax.random.key(seed), 4), shapes.items(), strict=True):
            bound = 1 / math.sqrt(math.prod(shape[:-1]))
            weight, bias = jax.random.split(key)
            self.params[f"{name}.weight"] = jax.random.uniform(weight, shape, minval=-bound, maxval=bound)
            self.params[f"{name}.bias"] = jax.random.uniform(bias, shape[-1:], minval=-bound, maxval=bound)

    def state_dict(self) -> Params:
        """Returns the parameters by name."""
        return self.params

    def named_parameters(self) -> list[tuple[str, jax.Array]]:
        """Returns (name, parameter) of each."""
        return list(self.params.items())

    @staticmethod
    def log_probabilities(params: Params, x_BHWC: jax.Array, keys_B: jax.Array | None = None) -> jax.Array:
        """Returns [B, K]; with a key for each example, dropout as in training."""
        for name in ("conv1", "conv2"):
            dims = ("NHWC", "HWIO", "NHWC")
            x_BHWC = jax.lax.conv_general_dilated(
                x_BHWC, params[f"{name}.weight"], (1, 1), "SAME", dimension_numbers=dims
            )
            x_BHWC = x_BHWC + params[f"{name}.bias"]
            if name == "conv2" and keys_B is not None:
                x_BHWC = dropped(x_BHWC, keys_B, (1, 1, x_BHWC.shape[-1]))  # whole channels, as Dropout2d
            x_BHWC = jax.nn.relu(
                jax.lax.reduce_window(x_BHWC, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
            )
        x_BC = jax.nn.relu(x_BHWC.reshape(x_BHWC.shape[0], -1) @ params["fc1.weight"] + params["fc1.bias"])
        if keys_B is not None:
            x_BC = dropped(x_BC, jax.vmap(lambda key: jax.random.fold_in(key, 1))(keys_B), x_BC.shape[1:])
        return jax.nn.log_softmax(x_BC @ params["fc2.weight"] + params["fc2.bias"])


def dropped(x: jax.Array, keys_B: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns `x` with half of it zero, drawn by each example's own key."""
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, shape))(keys_B)
    return jnp.where(keep, 2 * x, 0)


class DistributedSampler:
    """The examples of one rank, as torch's sampler: shuffled the same on all ranks, every n-th is this rank's, padded
    from the front."""

    def __init__(self, num_examples: int, num_replicas: int, rank: int, seed: int = 0):
        self.num_examples, self.num_replicas, self.rank, self.seed, self.epoch = (
            num_examples,
            num_replicas,
            rank,
            seed,
            0,
        )

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, which determines the order."""
        self.epoch = epoch

    def batches(self, batch_size: int) -> Iterator[np.ndarray]:
        """Yields the indices of the examples of each batch."""
        order = np.random.default_rng((self.seed, self.epoch)).permutation(self.num_examples)
        mine = np.resize(order, len(self) * self.num_replicas)[self.rank :: self.num_replicas]
        yield from (mine[i : i + batch_size] for i in range(0, len(mine), batch_size))

    def __len__(self) -> int:
        return math.ceil(self.num_examples / self.num_replicas)


def digits() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns (training, test): `images` float32[examples, 8, 8, 1], normalized, and `labels` int32[examples]."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images, labels = ((bunch.images[..., None] / 16 - 0.305) / 0.376).astype(np.float32), bunch.target.astype(np.int32)
    whole = {"images": images, "labels": labels}
    return {k: v[:NUM_TRAIN] for k, v in whole.items()}, {k: v[NUM_TRAIN:] for k, v in whole.items()}


def nll_loss(params: Params, images_BHWC: jax.Array, labels_B: jax.Array, keys_B: jax.Array, dtype: str) -> jax.Array:
    """Returns the mean negative log-likelihood of this rank's examples; computed in `dtype`, returned in float32."""
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    log_BK = Net.log_probabilities(params, images_BHWC.astype(dtype), keys_B).astype(jnp.float32)
    return -jnp.take_along_axis(log_BK, labels_B[:, None], 1).mean()


gradient = jax.jit(jax.value_and_grad(nll_loss), static_argnums=4)
predict = jax.jit(lambda params, images_BHWC: Net.log_probabilities(params, images_BHWC))


def example_keys(seed: int, epoch: int, places_B: np.ndarray) -> jax.Array:
    """Returns a key for each example of an epoch, the same on any rank."""
    key = jax.random.fold_in(jax.random.key(seed), epoch)
    return jax.vmap(lambda place: jax.random.fold_in(key, place))(jnp.asarray(places_B))


def train(args: argparse.Namespace) -> Params:
    """Trains on this rank and tests after each epoch. Returns the parameters, the same on every rank."""

    def train_epoch(epoch: int, params: Params, opt_state: optax.OptState) -> tuple[Params, optax.OptState]:
        # Horovod: set epoch to sampler for shuffling.
        train_sampler.set_epoch(epoch)
        num_batches = math.ceil(len(train_sampler) / args.batch_size)
        for batch_idx, places in enumerate(train_sampler.batches(args.batch_size)):
            images, labels = train_dataset["images"][places], train_dataset["labels"][places]
            loss, gradients = gradient(params, images, labels, example_keys(args.seed, epoch, places), dtype)
            updates, opt_state = optimizer.update(gradients, opt_state, params)
            params = optax.apply_updates(params, updates)
            if batch_idx % args.log_interval == 0:
                # Horovod: use train_sampler to determine the number of examples in this worker's partition.
                done, share = batch_idx * len(places), 100.0 * batch_idx / num_batches
                print(f"Train Epoch: {epoch} [{done}/{len(train_sampler)} ({share:.0f}%)]\tLoss: {loss:.6f}")
        return params, opt_state

    def metric_average(val: float, name: str) -> float:
        tensor = jnp.asarray(val)
        avg_tensor = hvd.allreduce(tensor, name=name)
        return avg_tensor.item()

    def test(params: Params) -> None:
        test_loss = test_accuracy = 0.0
        for places in test_sampler.batches(args.test_batch_size):
            log_BK, labels = predict(params, test_dataset["images"][places]), test_dataset["labels"][places]
            test_loss -= float(jnp.take_along_axis(log_BK, labels[:, None], 1).sum())
            test_accuracy += float((log_BK.argmax(1) == labels).sum())

        # Horovod: use test_sampler to determine the number of examples in this worker's partition.
        test_loss /= len(test_sampler)
        test_accuracy /= len(test_sampler)

        # Horovod: average metric values across workers.
        test_loss = metric_average(test_loss, "avg_loss")
        test_accuracy = metric_average(test_accuracy, "avg_accuracy")

        # Horovod: print output only on first rank.
        if hvd.rank() == 0:
            print(f"\nTest set: Average loss: {test_loss:.4f}, Accuracy: {100.0 * test_accuracy:.2f}%\n")

    # Horovod: initialize library.
    hvd.init()
    args.cuda = not args.no_cuda and jax.default_backend() == "gpu"
    dtype = "bfloat16" if args.use_mixed_precision else "float32"

    if args.cuda:
        # Horovod: pin GPU to local rank.
        jax.config.update("jax_default_device", jax.local_devices()[hvd.local_rank() % jax.local_device_count()])

    train_dataset, test_dataset = digits()

    # Horovod: use DistributedSampler to partition the training data.
    train_sampler = DistributedSampler(len(train_dataset["labels"]), num_replicas=hvd.size(), rank=hvd.rank())

    # Horovod: use DistributedSampler to partition the test data.
    test_sampler = DistributedSampler(len(test_dataset["labels"]), num_replicas=hvd.size(), rank=hvd.rank())

    model = Net(args.seed)

    # By default, Adasum doesn't need scaling up learning rate.
    lr_scaler = hvd.size() if not args.use_adasum else 1

    # If using GPU Adasum allreduce, scale learning rate by local_size.
    if args.cuda and args.use_adasum and hvd.nccl_built():
        lr_scaler = hvd.local_size()

    # Horovod: scale learning rate by lr_scaler.
    optimizer = optax.sgd(args.lr * lr_scaler, momentum=args.momentum)

    # Horovod: broadcast parameters & optimizer state.
    params = hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    # Horovod: (optional) compression algorithm.
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none

    # Horovod: wrap optimizer with DistributedOptimizer.
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=compression,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )
    opt_state = optimizer.init(params)

    for epoch in range(1, args.epochs + 1):
        params, opt_state = train_epoch(epoch, params, opt_state)
        test(params)
    return params


if __name__ == "__main__":
    train(parser.parse_args())
