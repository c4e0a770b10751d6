"""The data table of common graphics cards, from their vendor's public specifications; a config adds others (``hardware.py``).

Figures are NVIDIA's: the memory's bandwidth from the product pages and data sheets, rates from the architecture whitepapers named at
each group, all dense (without 2:4 sparsity) and at the boost clock. On GeForce cards the half-precision rate is the one with fp32
accumulation, which is what cuBLAS runs: half of the rate with fp16 accumulation that shops print. Before Volta there are no tensor cores
and cuBLAS multiplies fp16 matrices on the fp32 units, so the fp16 rate is the fp32 rate there, not the native half-precision one (1/64).
fp32 is plain fp32, without TF32, as torch multiplies by default. PCIe: one direction, by generation and lanes (16 lanes of 3.0: 15.75 GB/s).

Memory is not what the box says but about what CUDA reports as total, by torch's out-of-memory messages in public issues, where the least is
taken: the driver keeps 2 % of a GeForce card, and error correction 6 to 9 % of those that have it on GDDR memory (a T4's 16 GiB are 14.6).
"""

from __future__ import annotations

from dataclasses import dataclass

_PCIE_3, _PCIE_4, _PCIE_4_X8, _PCIE_5 = 15.75, 31.5, 15.75, 63.0


@dataclass(frozen=True)
class CardSpec:
    """What a card can hold and how fast it is.

    ``memory_gib``: 2**30 bytes, as CUDA reports them; ``_gb_s``: 10**9 bytes a second; ``_tflops``: 10**12 operations a second.
    """

    memory_gib: float
    bandwidth_gb_s: float
    fp32_tflops: float
    fp16_tflops: float
    bf16_tflops: float  # 0: none
    pcie_gb_s: float
    capability: tuple[int, int]


CARDS: dict[str, CardSpec] = {
    # Pascal: GeForce GTX 1080 whitepaper, GTX 1080 Ti product page.
    "gtx1080": CardSpec(7.9, 320, 8.87, 8.87, 0, _PCIE_3, (6, 1)),
    "gtx1080ti": CardSpec(10.9, 484, 11.34, 11.34, 0, _PCIE_3, (6, 1)),
    # Volta: Tesla V100 whitepaper and data sheet (the PCIe board).
    "v100": CardSpec(15.7, 900, 14.0, 112, 0, _PCIE_3, (7, 0)),
    # Turing: "NVIDIA Turing GPU architecture" whitepaper (reference clocks), T4 data sheet.
    "rtx2080ti": CardSpec(10.7, 616, 13.4, 53.8, 0, _PCIE_3, (7, 5)),
    "t4": CardSpec(14.5, 320, 8.1, 65, 0, _PCIE_3, (7, 5)),
    # Ampere: "NVIDIA Ampere GA102 GPU architecture" and A100 whitepapers; A10 and A40 data sheets; the 3060 by cores x clock x 2.
    "rtx3060": CardSpec(11.7, 360, 12.7, 25.5, 25.5, _PCIE_4, (8, 6)),
    "rtx3070": CardSpec(7.7, 448, 20.3, 40.6, 40.6, _PCIE_4, (8, 6)),
    "rtx3080": CardSpec(9.7, 760, 29.8, 59.5, 59.5, _PCIE_4, (8, 6)),
    "rtx3090": CardSpec(23.6, 936, 35.6, 71, 71, _PCIE_4, (8, 6)),
    "rtxa6000": CardSpec(47.4, 768, 38.7, 154.8, 154.8, _PCIE_4, (8, 6)),
    "a10": CardSpec(22.0, 600, 31.2, 125, 125, _PCIE_4, (8, 6)),
    "a40": CardSpec(44.4, 696, 37.4, 149.7, 149.7, _PCIE_4, (8, 6)),
    "a100": CardSpec(39.4, 1555, 19.5, 312, 312, _PCIE_4, (8, 0)),
    "a10080gb": CardSpec(79.1, 2039, 19.5, 312, 312, _PCIE_4, (8, 0)),
    # Ada: "NVIDIA Ada GPU architecture" whitepaper, product pages, L4 and L40S data sheets (sparse rates halved).
    "rtx4060": CardSpec(7.7, 272, 15.1, 30.2, 30.2, _PCIE_4_X8, (8, 9)),
    "rtx4060ti": CardSpec(15.6, 288, 22.1, 44.1, 44.1, _PCIE_4_X8, (8, 9)),
    "rtx4070": CardSpec(11.7, 504, 29.1, 58.3, 58.3, _PCIE_4, (8, 9)),
    "rtx4080": CardSpec(15.6, 717, 48.7, 97.5, 97.5, _PCIE_4, (8, 9)),
    "rtx4090": CardSpec(23.5, 1008, 82.6, 165.2, 165.2, _PCIE_4, (8, 9)),
    "l4": CardSpec(22.0, 300, 30.3, 121, 121, _PCIE_4, (8, 9)),
    "l40s": CardSpec(44.4, 864, 91.6, 362, 362, _PCIE_4, (8, 9)),
    # Hopper: H100 whitepaper, H200 data sheet.
    "h100": CardSpec(79.1, 3350, 67, 989, 989, _PCIE_5, (9, 0)),
    "h200": CardSpec(139.8, 4800, 67, 989, 989, _PCIE_5, (9, 0)),
    # Blackwell: "NVIDIA RTX Blackwell GPU architecture" whitepaper.
    "rtx5080": CardSpec(15.4, 960, 56.3, 112.6, 112.6, _PCIE_5, (12, 0)),
    "rtx5090": CardSpec(31.3, 1792, 104.8, 209.5, 209.5, _PCIE_5, (12, 0)),
}
