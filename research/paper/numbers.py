"""Numbers printed in the paper's tables."""

from __future__ import annotations

# NDCG@10 of GBRT, λ-MART and L-GMML.
QUALITY = {
    "yahoo1": "L-GMML .6715, λ-MART .7060, GBRT .6824",
    "yahoo2": "L-GMML .7264, λ-MART .7062, GBRT .6817",
    "mslr-web10k": "L-GMML .5390, λ-MART .4513, GBRT .4342",
    "mslr-web30k": "L-GMML .4976, λ-MART .4090, GBRT .4146",
}

# Queries and documents of train, validation and test part; relevance levels; features.
LARGE_SETS: dict[str, tuple[int | str, ...]] = {
    "yahoo1": (19_944, 2_994, 6_983, 473_134, 71_083, 165_660, 5, 519),
    "yahoo2": (1_266, 1_266, 3_798, 34_815, 34_881, 103_174, 5, 596),
    "mslr-web10k": (6_000, 2_000, 2_000, 723_412, 235_259, 235_259, 5, 136),
    "mslr-web30k": (31_531, 6_306, 6_306, "3,771k", 6_306, "753k", 5, 136),
}

# Features and songs.
SONGS = {"Audio": (1_024, 5_419), "Lyrics-128": (128, 2_000), "Lyrics-256": (256, 2_000)}

# Scoring time per document, as printed: "ms".
SCORING = {
    "yahoo1": "GBRT 276, λ-MART 302, L-GMML 421",
    "yahoo2": "GBRT 218, λ-MART 286, L-GMML 421",
    "mslr-web10k": "GBRT 73, λ-MART 92, L-GMML 158",
}
