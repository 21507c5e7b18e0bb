"""Customer reviews: generated ones for training, hand-written ones of other trades for testing."""

from __future__ import annotations

import re
from itertools import product
from random import Random

POSITIVE = "positive"
NEGATIVE = "negative"

REVIEWS_PER_LABEL = 160
SHARE_OF_DOUBLES = 0.3

TRAINING_QUESTIONS = (
    "Is this review positive or negative? {review}",
    "Review: {review}",
    "What is the sentiment of this text? {review}",
    "Did the customer like it, positive or negative?\n{review}",
    "{review}",
)
HELD_OUT_QUESTIONS = (
    "Label the following comment as positive or negative.\n\n{review}",
    "{review}\n\nWas that opinion positive or negative?",
)

SUBJECTS = {
    "the restaurant": ("the soup", "the waiter", "the menu"),
    "the film": ("the plot", "the lead actor", "the ending"),
    "the phone": ("the battery", "the screen", "the camera"),
    "the hotel": ("the room", "the bed", "the staff"),
    "the book": ("the story", "the first chapter", "the hero"),
    "the app": ("the design", "the search", "the last update"),
}
OPINIONS = {
    POSITIVE: (
        "I loved {subject}, and {part} was wonderful.",
        "{part} was excellent.",
        "I would recommend {subject} to anyone.",
        "{subject} was worth every penny.",
        "I had my doubts, but {subject} won me over.",
        "There is nothing to complain about: {part} was perfect.",
        "{subject} was not bad at all, I was surprised.",
        "What a pleasure! {part} made my day.",
        "I cannot find a single fault with {subject}.",
        "Best of all was {part}. I will be back.",
        "{part} was much better than I had hoped.",
        "At last something that works. I am so glad I chose {subject}.",
        "I smiled the whole time. Thank you!",
        "Five stars for {part}.",
    ),
    NEGATIVE: (
        "I hated {subject}, and {part} was awful.",
        "{part} was terrible.",
        "I would not recommend {subject} to anyone.",
        "{subject} was a waste of money.",
        "I had high hopes, but {subject} let me down.",
        "There is nothing to praise: {part} was a mess.",
        "{subject} was not good at all, I was annoyed.",
        "What a disaster! {part} ruined my day.",
        "I cannot find a single good thing about {subject}.",
        "Worst of all was {part}. Never again.",
        "{part} was much worse than I had feared.",
        "Nothing works as it should. I am sorry I chose {subject}.",
        "I was bored the whole time. I want my money back.",
        "One star, and that is too much for {part}.",
    ),
}

HELD_OUT_REVIEWS = {
    POSITIVE: (
        "My hairdresser listened to me, and I walked out feeling like a queen.",
        "The plumber came within the hour and fixed the leak for a fair price.",
        "Our kids laughed until they cried. We will visit this zoo again next summer.",
        "This bicycle rides like a dream, even uphill.",
        "I was afraid of the dentist for years. Not any more, she was so gentle.",
        "The museum guide brought every painting to life.",
        "Delicious cake, friendly baker, lovely shop.",
        "The jacket fits perfectly and keeps me warm in the snow.",
        "I never thought a vacuum cleaner could make me happy, but here we are.",
        "The concert gave me goosebumps. Unforgettable.",
        "Great value. These headphones sound twice as expensive as they are.",
        "The course was clear and fun, and I passed my exam with ease.",
        "We slept like babies on this mattress.",
        "The taxi was spotless and the driver got us to the airport early.",
        "A beautiful garden and the most welcoming hosts.",
        "No problems with the delivery, everything arrived fresh and on time.",
    ),
    NEGATIVE: (
        "My hairdresser ignored what I asked for, and I left in tears.",
        "The plumber came three days late and the leak is still there.",
        "Our kids were crying after ten minutes. Sad, dirty cages everywhere in this zoo.",
        "This bicycle fell apart on the second day.",
        "The dentist was rude and it hurt for a week.",
        "The museum guide mumbled and looked at his watch.",
        "Dry cake, grumpy baker, filthy shop.",
        "The jacket lost its zip within a week and lets the cold in.",
        "I wanted to like this vacuum cleaner, but it only blows the dust around.",
        "The concert was so badly played that people left early.",
        "Cheap plastic. These headphones broke the first time I used them.",
        "The course was confusing and dull, and I failed my exam.",
        "My back aches every morning since we bought this mattress.",
        "The taxi smelled of smoke and the driver got lost twice, so we missed our flight.",
        "They overcharged us and refused to refund a cent.",
        "The delivery was late again, and half of the food was rotten.",
    ),
}


def training_reviews(seed: int) -> list[tuple[str, str]]:
    """Return balanced (prompt, label) pairs; a review has one opinion, or two that agree."""
    random = Random(seed)
    reviews = []
    for label, opinions in OPINIONS.items():
        sentences = {
            sentence(opinion, subject, part)
            for opinion, (subject, parts) in product(opinions, SUBJECTS.items())
            for part in parts
        }
        for review in random.sample(sorted(sentences), REVIEWS_PER_LABEL):
            if random.random() < SHARE_OF_DOUBLES:
                review += " " + sentence(random.choice(opinions), "it", "the service")
            reviews.append((random.choice(TRAINING_QUESTIONS).format(review=review), label))
    random.shuffle(reviews)
    return reviews


def held_out_reviews() -> list[tuple[str, str]]:
    """Return the hand-written (prompt, label) pairs."""
    return [
        (HELD_OUT_QUESTIONS[index % len(HELD_OUT_QUESTIONS)].format(review=review), label)
        for label, reviews in HELD_OUT_REVIEWS.items()
        for index, review in enumerate(reviews)
    ]


def sentence(opinion: str, subject: str, part: str) -> str:
    text = opinion.format(subject=subject, part=part)
    return re.sub(r"(^|[.!?] )([a-z])", lambda start: start[1] + start[2].upper(), text)
