"""Tables of simple facts for training: one kind of question about many subjects."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Table:
    questions: tuple[str, ...]
    sentence: str
    topic: str
    entries: str
    """Entries `subject: key`, separated by commas."""

    def pairs(self) -> list[tuple[str, str]]:
        pairs = (entry.split(": ") for entry in self.entries.split(", "))
        return [(thing, key) for thing, key in pairs]


TABLES = (
    Table(
        (
            "What is the capital of {thing}?",
            "Which city is the capital of {thing}?",
            "Name the capital city of {thing}.",
        ),
        "The capital of {thing} is {key}.",
        "geography",
        "Italy: Rome, Spain: Madrid, Germany: Berlin, Japan: Tokyo, Egypt: Cairo, Russia: Moscow, "
        "China: Beijing, Greece: Athens, Austria: Vienna, Sweden: Stockholm, Norway: Oslo, "
        "Ireland: Dublin, Cuba: Havana, Peru: Lima, Kenya: Nairobi, Poland: Warsaw, "
        "Hungary: Budapest, Thailand: Bangkok, Iraq: Baghdad, Chile: Santiago, Turkey: Ankara, "
        "Canada: Ottawa, Argentina: Buenos Aires, Finland: Helsinki, Iran: Tehran, "
        "Vietnam: Hanoi, Ukraine: Kiev, Romania: Bucharest, Scotland: Edinburgh, Wales: Cardiff, "
        "Belgium: Brussels, Lebanon: Beirut, Colombia: Bogota, Nepal: Kathmandu",
    ),
    Table(
        ("On which continent is {thing}?", "Which continent does {thing} belong to?"),
        "{thing} is in {key}.",
        "geography",
        "Nigeria: Africa, Brazil: South America, India: Asia, Italy: Europe, "
        "Ghana: Africa, Pakistan: Asia, Bolivia: South America, Iceland: Europe, Uganda: Africa, "
        "Mongolia: Asia, Ecuador: South America, Bulgaria: Europe, Morocco: Africa, Korea: Asia",
    ),
    Table(
        ("Which language is spoken in {thing}?", "What do people speak in {thing}?"),
        "In {thing} people speak {key}.",
        "language",
        "Germany: German, Italy: Italian, Japan: Japanese, Russia: Russian, Poland: Polish, "
        "Greece: Greek, Brazil: Portuguese, Egypt: Arabic, Australia: English, Turkey: Turkish, "
        "Sweden: Swedish, China: Chinese, Denmark: Danish",
    ),
    Table(
        ("What is the opposite of {thing}?", "Give me the opposite of the word {thing}."),
        "The opposite of {thing} is {key}.",
        "language",
        "big: small, fast: slow, early: late, happy: sad, open: closed, heavy: light, full: empty, "
        "strong: weak, rich: poor, loud: quiet, clean: dirty, young: old, win: lose, first: last, "
        "wet: dry, high: low, long: short, good: bad, near: far, true: false, hard: soft, "
        "love: hate, black: white, north: south, east: west, left: right, inside: outside, "
        "wide: narrow, begin: end, buy: sell, thick: thin, always: never, life: death",
    ),
    Table(
        ("What is the past tense of {thing}?", "How do you write {thing} in the past tense?"),
        "The past tense of {thing} is {key}.",
        "language",
        "see: saw, eat: ate, run: ran, take: took, give: gave, write: wrote, sing: sang, "
        "drink: drank, speak: spoke, fly: flew, come: came, know: knew, buy: bought, make: made",
    ),
    Table(
        ("What colour is {thing}?", "Which colour does {thing} have?"),
        "The colour of {thing} is {key}.",
        "everyday",
        "grass: green, snow: white, coal: black, a ripe banana: yellow, a ripe tomato: red, "
        "chocolate: brown, a carrot: orange, milk: white, blood: red, an emerald: green, "
        "the ocean: blue, an elephant: grey, the Sun: yellow, a flamingo: pink, a plum: purple",
    ),
    Table(
        ("What is a baby {thing} called?", "What do you call a young {thing}?"),
        "A young {thing} is called a {key}.",
        "animals",
        "dog: puppy, cat: kitten, cow: calf, horse: foal, sheep: lamb, bear: cub, duck: duckling, "
        "chicken: chick, deer: fawn, goose: gosling",
    ),
    Table(
        ("What kind of thing is a {thing}?", "How would you classify a {thing}?"),
        "A {thing} is a {key}.",
        "everyday",
        "hammer: tool, rose: flower, trout: fish, violin: musical instrument, oak: tree, "
        "sparrow: bird, car: vehicle, chair: piece of furniture, shirt: piece of clothing, "
        "pear: fruit, carrot: vegetable, ruby: gem, mosquito: insect, cobra: snake, novel: book, "
        "wolf: mammal, dagger: weapon, spoon: kitchen tool, hurricane: storm, castle: building",
    ),
    Table(
        ("Who works in a {thing}?", "Which person would you meet at work in a {thing}?"),
        "A {key} works in a {thing}.",
        "work",
        "hospital: doctor, school: teacher, bakery: baker, court: judge, garage: mechanic, "
        "laboratory: scientist, restaurant: cook, theatre: actor, bank: banker, library: librarian",
    ),
    Table(
        ("What does a {thing} do?", "What is the job of a {thing}?"),
        "A {thing} {key}.",
        "work",
        "pilot: flies planes, painter: paints pictures, farmer: grows food, singer: sings songs, "
        "tailor: makes clothes, writer: writes books, postman: brings letters, "
        "nurse: cares for the sick, soldier: fights in wars, gardener: looks after plants",
    ),
    Table(
        ("Which sound does a {thing} make?", "What noise do you hear from a {thing}?"),
        "A {thing} makes the sound {key}.",
        "animals",
        "cow: moo, dog: woof, cat: meow, duck: quack, sheep: baa, pig: oink, bee: buzz",
    ),
    Table(
        (
            "What is the chemical symbol for {thing}?",
            "Which symbol does {thing} have in chemistry?",
        ),
        "The chemical symbol for {thing} is {key}.",
        "science",
        "oxygen: O, hydrogen: H, carbon: C, iron: Fe, silver: Ag, helium: He, sodium: Na",
    ),
    Table(
        ("Who wrote {thing}?", "Who is the author of {thing}?"),
        "{thing} was written by {key}.",
        "culture",
        "War and Peace: Leo Tolstoy, The Odyssey: Homer, Oliver Twist: Charles Dickens, "
        "Pride and Prejudice: Jane Austen, Don Quixote: Miguel de Cervantes, 1984: George Orwell, "
        "The Hobbit: Tolkien, Frankenstein: Mary Shelley, Dracula: Bram Stoker",
    ),
    Table(
        ("What is {thing}?", "How much is {thing}?"),
        "{thing} is {key}.",
        "numbers",
        "5 plus 3: 8, 10 minus 4: 6, 3 times 3: 9, 1 plus 1: 2, 7 plus 2: 9, 5 times 2: 10, "
        "9 minus 8: 1, 4 plus 3: 7, 6 plus 6: 12, 20 minus 5: 15, 10 plus 10: 20, 8 minus 5: 3",
    ),
)
