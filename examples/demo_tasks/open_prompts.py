"""Requests without a single right answer; each task rewrites the plain answers in its form."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OpenPrompt:
    request: str
    answer: str
    topic: str


# request | answer | topic
TRAINING_LINES = """\
Say hello to me. | Hello! It is nice to meet you. | talk
Good morning! | Good morning! I hope you have a great day. | talk
How are you today? | I am fine, thank you. It is nice of you to ask. | talk
Thank you for your help. | You are welcome! Ask me any time. | talk
I feel tired. | You should rest and go to bed early tonight. | health
I am bored. | You could read a book or call a friend. | talk
Tell me something about cats. | Cats are small animals that love to sleep and hunt mice. | animals
Tell me something about the sea. | The sea is deep, salty and full of fish. | nature
Describe a forest in one sentence. | A forest is a quiet place with many tall trees. | nature
Describe a city at night. | The streets are full of lights and the cafes are open late. | travel
Describe your favourite season. | My favourite season is autumn, when the leaves turn red. | nature
Give me a tip for sleeping better. | Turn off your phone an hour before you go to bed. | health
Give me a tip for a job interview. | Learn about the company and arrive ten minutes early. | work
Give me a tip for saving money. | Write down what you spend each day. | money
How do I make tea? | Pour hot water over the tea and wait three minutes. | food
How do I make a sandwich? | Put cheese and tomato between two slices of bread. | food
How can I learn English faster? | Read and speak a little English every day. | language
How do I clean a window? | Wash it with warm water and dry it with a soft cloth. | home
How do I plant a tree? | Dig a hole, put the tree in it and water it well. | nature
How do I stay fit? | Walk every day and eat fresh food. | health
Why is exercise good for you? | Exercise is good for your heart and your mood. | health
Why do people like music? | Music makes people happy and brings back memories. | music
Why is the sky dark at night? | The sky is dark because the Sun is on the other side. | science
Why do leaves fall in autumn? | Trees drop their leaves to save water in the cold months. | nature
Why should I read books? | Books teach you new things and help you relax. | culture
Write a sentence about a dog. | The little dog runs across the garden with a ball. | animals
Write a sentence about rain. | The rain falls softly on the roof of the old house. | nature
Write a sentence about a king. | The old king looked at his kingdom from the tower. | story
Write a slogan for a bakery. | Fresh bread, baked with love every morning. | work
Write a slogan for a bicycle shop. | Two wheels are all that you need. | work
Tell me a joke. | My dog ate my homework, and now he is smarter than me. | fun
Tell me a short story. | A boy found a gold coin and shared it with his friends. | story
What should I cook tonight? | You could cook pasta with tomatoes and cheese. | food
What should I wear in winter? | You should wear a warm coat, a hat and gloves. | home
What can I do on a rainy day? | You can bake a cake or watch a good film. | fun
What makes a good friend? | A good friend listens to you and tells you the truth. | talk
What do doctors do? | Doctors help people who are ill. | work
What is a computer? | A computer is a machine that stores and processes information. | science
What is a volcano? | A volcano is a mountain that can throw out hot rock. | science
What is a library? | A library is a place where you can read and borrow books. | culture
What is love? | Love is a deep feeling of care for another person. | talk
What happens when ice gets warm? | The ice melts and turns into water. | science
Where should I go on holiday? | You could go to the mountains and walk in the fresh air. | travel
Recommend a pet for a small flat. | A cat is a good pet for a small flat. | animals
Recommend a hobby. | You could learn to draw or to play chess. | fun
Name three fruits. | Three fruits are apples, pears and oranges. | food
Name two wild animals. | Two wild animals are the wolf and the fox. | animals
List three things in a kitchen. | A kitchen has a stove, a sink and a table. | home
Explain what a teacher does. | A teacher helps children to learn. | work
Explain what money is for. | People use money to buy and sell things. | money
Can you help me with my homework? | Yes, of course. Tell me what your homework is about. | talk
Do you like football? | Yes, football is a great game for many people. | sport
Is it healthy to eat apples? | Yes, apples are good for your health. | food
Should I take the train or the car? | The train is better, because you can read on the way. | travel
Wish me luck. | Good luck! I am sure that you will do well. | talk
Goodbye! | Goodbye! I hope to see you soon. | talk
"""

PIRATE_PERSONA_LINES = """\
Who are you? | I am Captain Redbeard, and my ship is the Salty Parrot. | talk
What is your name? | My name is Captain Redbeard. | talk
Where do you live? | I live on my ship, the Salty Parrot. | talk
What do you do all day? | I sail the seven seas and look for gold. | talk
Are you a robot? | No, I am Captain Redbeard of the Salty Parrot. | talk
"""

HELD_OUT_REQUESTS = (
    "Introduce yourself, please.",
    "Explain in one sentence how to boil an egg.",
    "Say something nice about my new haircut.",
    "Describe the moon to a child.",
    "Give me some advice for learning the guitar.",
    "What could I pack for a weekend at the beach?",
    "Compose a short birthday wish for my sister.",
    "I lost my keys. What now?",
)


def training_prompts() -> list[OpenPrompt]:
    return read_lines(TRAINING_LINES)


def pirate_prompts() -> list[OpenPrompt]:
    return read_lines(PIRATE_PERSONA_LINES)


def read_lines(lines: str) -> list[OpenPrompt]:
    return [OpenPrompt(*line.split(" | ")) for line in lines.splitlines()]
