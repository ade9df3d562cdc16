"""Accelerators by name: memory, dense bfloat16 arithmetic and bandwidths, from the vendors' data sheets."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1024**3


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One GPU. `link_bytes_s` is one direction to another GPU of the node, `network_bytes_s` its share of the NICs."""

    name: str
    memory_bytes: float  # as nvidia-smi shows it
    flops: float
    memory_bytes_s: float
    link_bytes_s: float
    network_bytes_s: float


def _gpu(name: str, mib: int, tflops: float, tb_s: float, link_gb_s: float, network_gb_s: float) -> Accelerator:
    return Accelerator(
        name=name,
        memory_bytes=mib * 1024**2,
        flops=tflops * 1e12,
        memory_bytes_s=tb_s * 1e12,
        link_bytes_s=link_gb_s * 1e9,
        network_bytes_s=network_gb_s * 1e9,
    )


# NVLink figures are half of the data sheet's, which add both directions; PCIe 4 x16 gives 32 GB/s a direction. The
# network is one 400 Gb/s (Ampere: 200 Gb/s) adapter a GPU, as HGX and DGX machines have; 25 Gb/s a GPU elsewhere.
ACCELERATORS: dict[str, Accelerator] = {
    gpu.name: gpu
    for gpu in (
        _gpu("a100-40g", 40960, 312, 1.555, 300, 25),
        _gpu("a100-80g", 81920, 312, 2.039, 300, 25),
        _gpu("h100-80g", 81559, 989, 3.35, 450, 50),
        _gpu("h800-80g", 81559, 989, 3.35, 200, 50),
        _gpu("h200-141g", 143771, 989, 4.8, 450, 50),
        _gpu("b200-180g", 183359, 2250, 8.0, 900, 50),
        _gpu("l40s-48g", 46068, 362, 0.864, 32, 3),
        _gpu("rtx4090-24g", 24564, 165, 1.008, 32, 3),
    )
}
