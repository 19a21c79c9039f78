"""Topics, each with words that show that a text is about it."""

from __future__ import annotations

from collections.abc import Mapping

_TOPICS = """
rivers: water stream bank           lakes: water shore swim             oceans: sea wave water
islands: sea coast land             mountains: peak climb high          valleys: green hill low
forests: tree wood green            deserts: sand dry hot               caves: dark rock deep
beaches: sand sea shore             waterfalls: water fall stream       volcanoes: volcano hot fire
storms: wind rain thunder           clouds: sky rain white              rainbows: sky rain light
winters: snow cold ice              summers: sun hot warm               autumns: leaf wind cool
springs: flower warm green          nights: dark moon star              mornings: sun early day
stars: sky night shine              planets: space moon sun             comets: space sky tail
gardens: flower plant grow          flowers: plant bloom smell          trees: leaf branch wood
leaves: leaf tree green             roses: flower red thorn             mushrooms: forest cap soil
farms: field cow farmer             orchards: apple fruit tree          horses: ride mane stable
dogs: bark puppy pet                cats: kitten purr pet               rabbits: ear hop fur
birds: wing sing nest               owls: night wing hoot               eagles: wing sky hunt
ducks: pond swim feather            chickens: egg hen farm              cows: milk farm grass
sheep: wool lamb flock              goats: milk horn climb              foxes: fur red tail
wolves: wolf pack howl              bears: fur honey forest             lions: mane roar pride
elephants: trunk tusk big           monkeys: tree climb tail            whales: sea big swim
dolphins: sea swim clever           sharks: tooth sea fin               turtles: shell slow egg
frogs: pond jump green              snakes: scale long skin             spiders: web leg silk
bees: honey hive flower             ants: hill small work               butterflies: wing flower color
apples: fruit tree red              oranges: fruit juice sweet          bananas: fruit yellow peel
lemons: sour juice yellow           grapes: wine fruit vine             cherries: red fruit sweet
potatoes: potato soil cook          tomatoes: tomato red salad          carrots: root soup orange
onions: cook tear layer             beans: green cook plant             nuts: shell tree eat
pancakes: pan flour breakfast       cakes: sweet bake sugar             soups: hot bowl cook
pies: bake crust sweet              cookies: bake sweet sugar           sandwiches: bread lunch cheese
pizzas: cheese dough oven           noodles: soup bowl eat              kitchens: cook stove sink
bedrooms: bed sleep room            houses: home roof door              castles: king tower wall
towers: tall high stone             bridges: river cross road           roads: car drive street
streets: city road walk             cities: town street people          villages: small town people
markets: buy sell stall             shops: buy sell store               schools: learn teacher class
teachers: class learn school        classrooms: desk school learn       libraries: book read shelf
books: read page story              letters: write paper mail           stories: tell read book
poems: verse rhyme write            songs: sing music tune              drums: beat music loud
guitars: string music play          pianos: key music play              violins: string bow music
dances: music step move             theaters: stage play actor          museums: art old picture
paintings: paint color art          pictures: frame wall color          statues: stone art old
photographs: camera photo picture   films: movie watch screen           games: play fun win
puzzles: piece solve think          toys: play child fun                dolls: play toy child
kites: wind fly string              balls: play throw round             bicycles: ride wheel bike
cars: drive road wheel              buses: ride road seat               trains: rail track ride
boats: sail water row               ships: sea sail captain             airplanes: fly sky wing
rockets: space fly moon             wheels: round turn roll             clocks: time hour hand
watches: time wrist hand            lamps: light bulb room              candles: wax flame light
mirrors: glass face look            chairs: sit leg wood                tables: wood eat leg
beds: sleep pillow night            blankets: warm soft bed             pillows: soft bed sleep
shoes: foot walk wear               hats: head wear brim                coats: warm wear winter
gloves: hand warm wear              umbrellas: rain wet dry             bags: carry strap full
pockets: coat coin hand             coins: money metal pay              keys: lock door open
doors: open house room              windows: glass light house          stairs: step climb floor
roofs: house top rain               gates: fence open garden            fences: wood garden gate
tools: work fix hammer              hammers: nail tool hit              ropes: knot pull long
knots: rope tie string              pencils: write draw paper           pens: ink write paper
maps: road land travel              friends: talk share help            families: home parent child
neighbors: house street help        grandparents: old family story      babies: small cry sleep
birthdays: cake gift party          parties: friend music fun           holidays: travel rest family
picnics: food park basket           journeys: travel road far           dreams: sleep night mind
jokes: laugh funny tell             doctors: sick health help           nurses: care sick help
farmers: field grow farm            bakers: bread bake oven             pilots: fly airplane sky
sailors: sea ship sail              painters: paint brush art           gardeners: plant grow garden
"""

_ALIKE = {"sheep": "sheep", "leaves": "leaf", "wolves": "wolf", "buses": "bus"}


def _singular(name: str) -> str:
    if name in _ALIKE:
        return _ALIKE[name]
    for plural, singular in (("ies", "y"), ("ches", "ch"), ("xes", "x"), ("oes", "o")):
        if name.endswith(plural) and name not in {"movies", "cookies", "pies", "shoes"}:
            return name.removesuffix(plural) + singular
    return name.removesuffix("s")


def _read() -> dict[str, tuple[str, ...]]:
    families: dict[str, list[str]] = {}
    for token in _TOPICS.split():
        if token.endswith(":"):
            families[token[:-1]] = [token[:-1], _singular(token[:-1])]
        else:
            families[next(reversed(families))].append(token)
    return {name: tuple(dict.fromkeys(words)) for name, words in families.items()}


TOPICS: Mapping[str, tuple[str, ...]] = _read()
"""Name of a topic, in the plural -> the name, its singular, and words that belong to it."""
