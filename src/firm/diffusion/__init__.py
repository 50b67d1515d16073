"""SIA: anomalies by a diffusion model whose sampling is perturbed."""
