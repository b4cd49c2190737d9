"""A made-up search log of a shop for docs/tutorial.md: python -m examples.shop writes shop.parquet and new.parquet.

A row is a product that was shown for a search. Words, empty cells, a date and free text stand in it as in a real log.
What people did follows from several columns at once, and from chance.
"""

from __future__ import annotations

from datetime import date, timedelta

import numpy as np
import pandas as pd

BRANDS = np.array(["Alder", "Birch", "Cedar", "Hazel", "Linden", "Maple", "Rowan", "Willow"])
COLOURS = np.array(["black", "blue", "green", "red", "white"])
THINGS = np.array(["backpack", "boots", "jacket", "lamp", "shoes", "tent"])
GRADES = (0.7, 0.88, 0.96)  # shares of the rows below 1 (clicked), 2 (put into the basket) and 3 (bought)


def make_log(searches: int, *, seed: int) -> pd.DataFrame:
    """A log of that many searches, each with 8 to 20 products; its rows are shuffled."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(8, 21, size=searches)
    n = int(sizes.sum())
    search = np.repeat(np.arange(searches), sizes)
    thing, asked = rng.choice(THINGS, searches)[search], rng.choice(COLOURS, searches)[search]
    usual_price = rng.normal(4, 0.4, size=searches)[search]  # its logarithm: what people who search this way pay
    brand, colour = rng.choice(BRANDS, n), rng.choice(COLOURS, n)
    text_match, price = rng.beta(3, 2, size=n), rng.lognormal(4, 0.5, size=n)
    reviews, rating = rng.poisson(rng.lognormal(2, 1, size=n)), rng.normal(4, 0.5, size=n).clip(1, 5)
    in_stock, days = rng.random(n) < 0.9, rng.integers(0, 700, size=n)

    appeal = 3 * text_match + (rating - 4) * np.minimum(reviews, 20) / 10 + 0.6 * (colour == asked) + 0.8 * in_stock
    appeal += 0.8 * np.isin(brand, ("Birch", "Linden")) - 1.5 * np.abs(np.log(price) - usual_price)
    appeal += rng.normal(0, 0.6, size=n)
    log = pd.DataFrame(
        {
            "search_id": [f"S{seed}{number:04d}" for number in search],
            "part": np.array(["train", "train", "train", "valid", "test"])[search % 5],
            "product": [f"P{seed}{number:05d}" for number in range(n)],
            "grade": np.searchsorted(np.quantile(appeal, GRADES), appeal),
            "title": [f"{b} {t} {number}" for number, (b, t) in enumerate(zip(brand, thing, strict=True))],
            "brand": pd.Series(brand).mask(rng.random(n) < 0.02),
            "colour": colour,
            "colour_fits": colour == asked,
            "text_match": text_match.round(4),
            "price": price.round(2),
            "rating": np.where(reviews > 0, rating.round(1), np.nan),  # no review, no rating
            "reviews": reviews,
            "in_stock": in_stock,
            "listed": [date(2026, 1, 1) - timedelta(days=int(age)) for age in days],
        }
    )
    return log.sample(frac=1, random_state=seed, ignore_index=True)


def main() -> None:
    make_log(400, seed=0).to_parquet("shop.parquet", index=False)
    make_log(20, seed=1).drop(columns=["part", "grade"]).to_parquet("new.parquet", index=False)


if __name__ == "__main__":
    main()
