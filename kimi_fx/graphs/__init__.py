"""The round as pure functions: tensors and static config in, tensors out.

One table of axis letters, used in every shape comment and einsum string:

    B  requests in the batch        L  latent width (512)          E  routed experts
    N  nodes of a tree, root first  R  rope width (64)             K  experts a token
    S  slots of a drafter's block   H  heads                       I  expert width
    T  tokens, B x N                D  model width                 V  vocabulary
    P  pages of the pool            C  tokens of a prefill chunk   A  accepted rows, depth + 1
"""
