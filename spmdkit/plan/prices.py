"""`cost_of`: the price of a planned step, by a dated file of prices per chip and hour (prices.yaml, or the user's).

    price of a step          price of a chip-hour x chips x seconds of a step / 3600
    of a billion tokens      price of a step x 1e9 / tokens of a step
    hours to N tokens        N / tokens per second / 3600

A price is looked up by the name of the machine if the target is one (`p5.48xlarge`; for cluster.yaml: `cluster`),
otherwise by the chip's name.
Network, storage, restarts and evaluation are not included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from spmdkit.config import problems, source, wording
from spmdkit.config.fields import Section
from spmdkit.errors import ConfigError
from spmdkit.mesh.chips import CHIPS, GPU_MACHINES

FILE = Path(__file__).with_name("prices.yaml")


class Prices(Section):
    """A file of prices."""

    date: Annotated[str, Field(examples=["'2026-11-27'"])]
    """Day on which the prices were valid."""
    currency: str = "USD"
    """Currency of all prices."""
    chip_hour: Annotated[dict[str, Annotated[float, Field(ge=0, le=1e6)]], Field(examples=["{v5p: 4.20}"])]
    """Chip or machine -> price of one chip for an hour."""
    sources: dict[str, str] = Field(default_factory=dict)
    """Chip or machine -> public source of its price."""


@dataclass(frozen=True)
class Pricing:
    """What the figures of money and time of a plan need.

    Attributes:
        prices: of the file.
        tokens: length of a training run in tokens; None: not requested.
    """

    prices: Prices
    tokens: float | None = None


def read_prices(path: Path | None = None) -> Prices:
    """Returns the prices of a file; None: those of the package.

    Raises:
        ConfigError: the file cannot be read, or has other keys or values.
    """
    file = FILE if path is None else path
    if not file.is_file():
        raise ConfigError(f"--prices {file}: no such file. It has prices of chips. Copy {FILE} and change it.")
    document = source.read_file(file.absolute(), str(file))
    try:
        return Prices.model_validate(document.value)
    except ValidationError as error:
        found = wording.translate(Prices, error.errors(include_url=False))
        raise ConfigError(problems.render(found, problems.Origin(file, str(file), document.places))) from None


def cost_of(document: Mapping[str, Any], pricing: Pricing) -> dict[str, Any]:
    """Returns the money and time of a plan; a value is None if its price, its time or its tokens are unknown."""
    name = document["target"].removeprefix("gpu:").partition(":")[0]
    is_file = name.endswith((".yaml", ".yml"))
    name = Path(name).stem if is_file else name if name in GPU_MACHINES else document["chip"]
    per_chip = pricing.prices.chip_hour.get(name)
    chip = CHIPS.get(document["chip"])
    num_chips = document["num_devices"] / (1 if chip is None else chip.devices_per_chip)
    time, step_s = document["time"] or {}, document["predicted_step_s"]
    per_hour = None if per_chip is None else per_chip * num_chips
    tokens_per_s = time.get("tokens_per_s")
    hours = pricing.tokens / tokens_per_s / 3600 if pricing.tokens and tokens_per_s else None
    return {
        "currency": pricing.prices.currency,
        "date": pricing.prices.date,
        "chip_hour": per_chip,
        "source": pricing.prices.sources.get(name),
        "per_hour": per_hour,
        "per_step": per_hour * step_s / 3600 if per_hour is not None and step_s else None,
        "per_billion_tokens": per_hour * 1e9 / tokens_per_s / 3600 if per_hour is not None and tokens_per_s else None,
        "tokens": pricing.tokens,
        "hours": hours,
        "total": per_hour * hours if per_hour is not None and hours is not None else None,
    }
