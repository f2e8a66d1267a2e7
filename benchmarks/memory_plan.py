"""What a run would need of a device's memory, without the device and without the weights.

    python benchmarks/memory_plan.py --task govreport --model FOLDER --device-gb 24 --lora-rank 16

All flags of train.py, for the longest prompts (`--prompt-tokens`, default `--max-prompt`). Of the
model only config.json is read, from a folder or from the hub.
"""

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from huggingface_hub import hf_hub_download  # noqa: E402

from config import Config, flag, parse  # noqa: E402
from data import stories  # noqa: E402
from errors import BadInput, read_json, run_cli  # noqa: E402
from model import ModelConfig  # noqa: E402
from plan import check_memory  # noqa: E402

FLAGS = tuple(f.name for f in dataclasses.fields(Config)) + ("prompt_tokens", "device_gb")


@dataclasses.dataclass(frozen=True)
class Flags(Config):
    prompt_tokens: int | None = flag(None, "prompt of the longest problem", unset="--max-prompt")
    device_gb: float | None = flag(None, "device memory, 1e9 bytes", unset="that of --device")


def main() -> None:
    cfg = parse(sys.argv[1:], __doc__, FLAGS, Flags)
    folder = Path(cfg.model or stories.MODEL)
    try:
        file = folder / "config.json"
        file = file if folder.is_dir() else Path(hf_hub_download(cfg.model, "config.json"))
    except Exception as e:  # of the network or the hub
        raise BadInput(f"--model {cfg.model}: no such folder, and from the hub: "
                       f"{str(e).splitlines()[0]}; name a folder with a config.json") from e
    shape = ModelConfig.from_hf(read_json(file), str(file))
    room = int(cfg.device_gb * 1e9) if cfg.device_gb else None
    print(check_memory(cfg, shape, cfg.prompt_tokens or cfg.max_prompt, room))


if __name__ == "__main__":
    run_cli(main)
