"""Types of GPU by the numbers that a PCI device reports, and by the names that nvidia-smi prints."""

from __future__ import annotations

#: Vendor and device -> type of GPU (pci.ids: 0x2941 is GB100 [HGX GB200], 0x31c2 and 0x31c3 are GB110 [GB300]).
GPU_TYPES = {
    "0x10de:0x1db1": "v100-sxm-16gb",
    "0x10de:0x1db5": "v100-sxm-32gb",
    "0x10de:0x1eb8": "t4-16gb",
    "0x10de:0x20b0": "a100-sxm-40gb",
    "0x10de:0x20b2": "a100-sxm-80gb",
    "0x10de:0x20b5": "a100-pcie-80gb",
    "0x10de:0x20f1": "a100-pcie-40gb",
    "0x10de:0x2204": "rtx-3090-24gb",
    "0x10de:0x2206": "rtx-3080-10gb",
    "0x10de:0x2230": "rtx-a6000-48gb",
    "0x10de:0x2235": "a40-48gb",
    "0x10de:0x2236": "a10-24gb",
    "0x10de:0x2237": "a10g-24gb",
    "0x10de:0x2321": "h100-nvl-94gb",
    "0x10de:0x2324": "h800-sxm-80gb",
    "0x10de:0x2329": "h20-sxm-96gb",
    "0x10de:0x2330": "h100-sxm-80gb",
    "0x10de:0x2331": "h100-pcie-80gb",
    "0x10de:0x2335": "h200-sxm-141gb",
    "0x10de:0x2342": "gh200-480gb",
    "0x10de:0x2684": "rtx-4090-24gb",
    "0x10de:0x26b1": "rtx-6000-ada-48gb",
    "0x10de:0x26b9": "l40s-48gb",
    "0x10de:0x27b8": "l4-24gb",
    "0x10de:0x2901": "b200-sxm-180gb",
    "0x10de:0x2941": "gb200-186gb",
    "0x10de:0x2b85": "rtx-5090-32gb",
    "0x10de:0x2bb1": "rtx-pro-6000-96gb",
    "0x10de:0x2bb5": "rtx-pro-6000-96gb",
    "0x10de:0x3182": "b300-sxm-288gb",
    "0x10de:0x31c2": "gb300-288gb",
    "0x10de:0x31c3": "gb300-288gb",
    "0x1002:0x738c": "mi100-32gb",
    "0x1002:0x740f": "mi210-64gb",
    "0x1002:0x74a1": "mi300x-192gb",
    "0x1002:0x74a5": "mi325x-256gb",
}
#: Those of these types that no profile is shipped for.
WITHOUT_PROFILE = frozenset(["a100-pcie-40gb", "mi100-32gb", "mi210-64gb"])
#: Names of products as nvidia-smi prints them -> type of GPU (NVIDIA's driver documentation, appendix "Supported NVIDIA
#: GPU products"), without the brand, in small letters. An RTX 3080 may have 10 or 12 GB, which its name does not say.
PRODUCTS = {
    "v100-sxm2-16gb": "v100-sxm-16gb",
    "v100-sxm2-32gb": "v100-sxm-32gb",
    "v100-sxm3-32gb": "v100-sxm-32gb",
    "t4": "t4-16gb",
    "a100-sxm4-40gb": "a100-sxm-40gb",
    "a100-sxm4-80gb": "a100-sxm-80gb",
    "a100 80gb pcie": "a100-pcie-80gb",
    "a100-pcie-40gb": "a100-pcie-40gb",
    "a10": "a10-24gb",
    "a10g": "a10g-24gb",
    "a40": "a40-48gb",
    "h100 80gb hbm3": "h100-sxm-80gb",
    "h100 pcie": "h100-pcie-80gb",
    "h100 nvl": "h100-nvl-94gb",
    "h800": "h800-sxm-80gb",
    "h20": "h20-sxm-96gb",
    "h200": "h200-sxm-141gb",
    "gh200 480gb": "gh200-480gb",
    "b200": "b200-sxm-180gb",
    "gb200": "gb200-186gb",
    "b300 sxm6 ac": "b300-sxm-288gb",
    "gb300": "gb300-288gb",
    "l4": "l4-24gb",
    "l40s": "l40s-48gb",
    "rtx 3090": "rtx-3090-24gb",
    "rtx 4090": "rtx-4090-24gb",
    "rtx 5090": "rtx-5090-32gb",
    "rtx a6000": "rtx-a6000-48gb",
    "rtx 6000 ada generation": "rtx-6000-ada-48gb",
    "rtx pro 6000 blackwell workstation edition": "rtx-pro-6000-96gb",
    "rtx pro 6000 blackwell server edition": "rtx-pro-6000-96gb",
}
_BRANDS = ("nvidia", "tesla", "geforce")


def type_of_product(name: str) -> str | None:
    """Return the type of a GPU by the name that nvidia-smi prints; None where it is not known here.

    >>> type_of_product("NVIDIA H100 80GB HBM3"), type_of_product("Tesla T4"), type_of_product("GeForce RTX 3080")
    ('h100-sxm-80gb', 't4-16gb', None)
    """
    words = [word for word in name.lower().split() if word not in _BRANDS]
    return PRODUCTS.get(" ".join(words))
