"""In which form published quantized checkpoints store which tensors, and the parts of each form.

Rules are pairs of a pattern of names and a form; the first that matches holds. ``quantized.py`` says what is inferred.
"""

from __future__ import annotations

from tests.models.published.names import Shape

Header = tuple[str, Shape]  # type as safetensors writes it, and shape
BITS = {"F32": 32, "I32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "U8": 8}

# As the bf16 checkpoints have them; F32 of A_log and the norm are inferred, the router's is of the release.
QWEN_REST = ((r"linear_attn\.(A_log|norm\.weight)$", "F32"), (r"", "BF16"))
NEMOTRON_REST = ((r"gate\.e_score_correction_bias$", "F32"), (r"", "BF16"))
MTP = (r"^mtp\.", "BF16")
QWEN_FP8 = (
    (r"\.(q|k|v|o)_proj\.weight$", "blocks"),
    (r"linear_attn\.(in_proj_qkv|in_proj_qkvz|in_proj_z|out_proj)\.weight$", "blocks"),
    (r"mlp\.(.*\.)?(gate|up|down)_proj\.weight$", "blocks"),
    *QWEN_REST,
)
QWEN_NVFP4 = (
    MTP,
    (r"self_attn\.(q|k|v|o)_proj\.weight$", "FP8"),
    (r"linear_attn\.(in_proj_qkv|in_proj_z|out_proj)\.weight$", "FP8"),
    (r"mlp\.(.*\.)?(gate|up|down)_proj\.weight$|lm_head\.weight$", "NVFP4"),
    *QWEN_REST,
)


def of_nano(form: str, before_attention: str) -> tuple[tuple[str, str], ...]:
    """Attention, and the Mamba layers in front of it, are left as they were."""
    return (
        (rf"layers\.({before_attention})\.mixer\.(in|out)_proj\.weight$", "BF16"),
        (r"mixer\.((in|out)_proj|.*experts\..*)\.weight$", form),
        (r"mixer\.gate\.weight$", "F32"),
        *NEMOTRON_REST,
    )


SUPER_NVFP4 = (
    MTP,
    (r"layers\.1\.mixer\.shared_experts\.down_proj\.weight$", "NVFP4 and input"),
    (r"layers\.4\.mixer\.shared_experts\.(up|down)_proj\.weight$", "BF16"),
    (r"layers\.2\.mixer\.out_proj\.weight$|layers\.1\.mixer\.fc2_latent_proj\.weight$", "BF16"),
    (r"mixer\.experts\..*\.weight$", "NVFP4 and input"),
    (r"mixer\.(in_proj|out_proj|o_proj|fc1_latent_proj|fc2_latent_proj|shared_experts\..*)\.weight$", "FP8"),
    *NEMOTRON_REST,
)
SUPER_FP8 = (
    MTP,
    (r"mixer\.(in_proj|out_proj|fc1_latent_proj|fc2_latent_proj|.*experts\..*)\.weight$", "FP8"),
    *NEMOTRON_REST,
)
LIGHTNING_NVFP4 = (
    MTP,
    (r"mixer\.(in|out)_proj\.weight$", "FP8"),
    (r"mixer\..*experts\..*\.weight$|lm_head\.weight$", "NVFP4"),
    (r"mixer\.gate\.weight$", "F32"),
    *NEMOTRON_REST,
)


def stored(name: str, shape: Shape, form: str) -> dict[str, Header]:
    """The tensors in which a tensor is stored."""
    base = name.removesuffix(".weight")
    if form in BITS:
        return {name: (form, shape)}
    if form == "blocks":
        scales = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
        return {name: ("F8_E4M3", shape), f"{name}_scale_inv": ("BF16", scales)}
    if form == "FP8":
        return {
            name: ("F8_E4M3", shape),
            **dict.fromkeys((f"{base}.weight_scale", f"{base}.input_scale"), ("F32", ())),
        }
    if form == "GPTQ":
        n, k = shape
        words = {f"{base}.qweight": ("I32", (k // 8, n)), f"{base}.qzeros": ("I32", (k // 16, n // 8))}
        return words | {f"{base}.scales": ("F16", (k // 16, n)), f"{base}.g_idx": ("I32", (k,))}
    groups = (*shape[:-1], shape[-1] // 16)
    scale = {f"{base}.weight_scale": ("F8_E4M3", groups), f"{base}.weight_scale_2": ("F32", ())}
    scale |= {f"{base}.input_scale": ("F32", ())} if form == "NVFP4 and input" else {}
    return {name: ("U8", (*shape[:-1], shape[-1] // 2)), **scale}
