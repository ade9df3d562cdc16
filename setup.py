"""Package metadata. Exact CPU pins are in scripts/requirements-cpu.txt; GPU dependencies are ranges."""

from setuptools import find_packages, setup

CORE = [
    "aiohttp>=3.9",
    "jsonschema>=4.18",
    "matplotlib>=3.8",
    "math-verify>=0.8",
    "numpy>=1.26",
    "psutil>=5.9",
    "pyarrow>=15",
    "pyyaml>=6",
    "ray>=2.50",
    "rich>=13",
    "safetensors>=0.4",
    "starlette>=0.40",
    "uvicorn>=0.30",
]
ENGINES = [
    "einops",
    "megatron-core>=0.16",
    "mbridge>=0.15.1",
    "sglang-router>=0.3.2",
    "torch>=2.9",
    "transformers>=5.12",
]

setup(
    name="slime_rl",
    version="0.1.0",
    description="RL post-training: Megatron-core trains, SGLang generates, a data buffer bridges them; GPU optional",
    python_requires=">=3.11",
    packages=find_packages(include=["slime_rl", "slime_rl.*", "plugins", "plugins.*"]),
    package_data={"slime_rl.plan": ["shapes/*/config.json"], "slime_rl.dashboard": ["static/*"]},
    entry_points={"console_scripts": ["slime-rl=slime_rl.cli:main"]},
    install_requires=CORE,
    extras_require={
        # sglang is not here: on CPU it is installed without its CUDA wheels, see scripts/install_cpu.sh
        "cpu": ENGINES,
        "gpu": [*ENGINES, "sglang>=0.5.23", "transformer-engine[pytorch]>=2.5"],
        "dev": ["codespell", "pre-commit", "pyright", "pytest", "ruff"],
        "tensorboard": ["tensorboard"],
        "wandb": ["wandb"],
        "mlflow": ["mlflow"],
        "trackio": ["trackio"],
        "prometheus": ["prometheus_client"],
        "examples": ["gguf", "openai", "reasoning-gym"],
    },
)
