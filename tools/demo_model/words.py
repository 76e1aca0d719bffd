"""The vocabulary of all tasks. Every list is a tuple, so that its order, and with it every example
drawn from a seed, is fixed."""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FIRST_NAMES = _words("""
Ada Adam Agnes Alan Alba Amir Anna Anton Arthur Beatrice Ben Bruno Carla Cesar Clara Daniel Dara
David Diana Edith Elena Elias Emil Emma Erik Esther Eva Felix Fiona Frank Greta Hana Hanna Hector
Helen Henry Hugo Ida Igor Ines Irene Isaac Iris Ivan Jacob Jane Jasmin Joel Jonas Julia Karim Karl
Kate Kira Lara Laura Leo Liam Lina Louis Lucy Maria Marco Marta Max Mina Mira Nadia Nina Noah Nora
Olga Oscar Otto Paul Pedro Petra Rafael Rita Rosa Ruth Samir Sara Simon Sofia Tara Theo Tina Tom
Ursula Vera Victor Walter Wanda Yara Yusuf Zoe
""")

LAST_NAMES = _words("""
Abbott Adler Alvarez Bauer Becker Bennett Bishop Blake Brandt Brooks Carter Castro Clarke Conti
Cooper Costa Cruz Dalton Diaz Dubois Duran Engel Evans Farrell Fischer Fleming Fuchs Garcia Gibson
Grant Gruber Haas Hansen Harris Hoffman Holm Hughes Ivers Jansen Jensen Keller Kelly Klein Kovac
Lambert Lang Larsen Lopez Marsh Mason Mendes Meyer Moreau Morgan Moser Murphy Nash Nolan Novak
Olsen Ortiz Owens Palmer Parker Perez Porter Quinn Reed Reyes Richter Rivera Romano Rossi Sato
Schmidt Silva Singh Stone Suarez Tanaka Taylor Torres Turner Vargas Vogel Wagner Walsh Weber Weiss
Winter Wolf Wright Young Ziegler
""")

CITIES = _words("""
Athens Bergen Berlin Bern Bogota Boston Bristol Cairo Calgary Chicago Dallas Delhi Denver Dublin
Florence Geneva Glasgow Graz Hamburg Hanoi Havana Helsinki Houston Istanbul Jakarta Kyoto Lagos
Leipzig Lima Lisbon London Lyon Madrid Malaga Manila Milan Montreal Munich Nairobi Naples Nice
Osaka Oslo Paris Porto Prague Quito Riga Rome Seattle Seoul Seville Sofia Sydney Tallinn Tokyo
Toronto Tunis Turin Utrecht Valencia Venice Vienna Warsaw Zagreb Zurich
""")

# Halves of the keys of tables: AmberFalcon, QuietHarbor.
KEY_HEADS = _words("""
Amber Azure Black Blue Bold Brave Bright Bronze Calm Clear Cold Copper Coral Crimson Crystal Dark
Deep Distant Dusty Early Eastern Empty Fast Fierce Final First Flat Frozen Gentle Giant Glass Golden
Grand Gray Green Happy Heavy Hidden High Hollow Honest Humble Icy Inner Iron Ivory Jolly Kind Large
Late Lazy Light Little Lone Long Lost Loud Lucky Lunar Marble Mighty Narrow Neat New Noble Northern
Odd Old Olive Orange Outer Pale Plain Proud Purple Quick Quiet Rapid Rare Red Rich Rough Round Royal
Rusty Sandy Secret Sharp Silent Silver Simple Slow Small Smooth Soft Solar Southern Stormy Strong
Sunny Sweet Swift Tall Tame Thin Tiny Vast Violet Warm White Wide Wild Wise Yellow
""")

KEY_TAILS = _words("""
Anchor Apple Arrow Bamboo Beacon Bear Bell Bridge Brook Cabin Camel Candle Canyon Castle Cliff Cloud
Comet Crane Creek Crown Delta Desert Dolphin Dragon Eagle Ember Falcon Feather Field Flame Forest
Fox Garden Gate Grove Hammer Harbor Hawk Heron Hill Horizon Island Jungle Kite Lake Lantern Leaf
Lemon Lily Lion Maple Market Meadow Mill Mirror Moon Moth Mountain Museum Needle Nest Oak Ocean
Orchard Orchid Otter Owl Palace Panda Path Peach Pebble Pepper Pine Planet Pond Rabbit Rain Raven
Ridge River Road Robin Rocket Rose Shadow Shell Shore Spring Square Star Summit Swan Temple Thunder
Tiger Tower Tulip Tunnel Turtle Valley Village Violin Water Whale Willow Wind Window Wolf
""")

COLORS = _words("red blue green yellow black white orange purple brown gray pink silver")
MATERIALS = _words("wool cotton leather steel glass wood paper plastic silk copper")
SIZES = _words("small medium large")
WEEKDAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _words("January February March April May June July August September October November December")
LANGUAGES = _words("English French German Spanish Italian Dutch Polish Greek Turkish Arabic Hindi Japanese")
COUNTRIES = _words("""
Austria Belgium Brazil Canada Chile China Croatia Denmark Egypt Finland France Germany Greece
Hungary India Ireland Italy Japan Kenya Mexico Norway Peru Poland Portugal Spain Sweden Turkey
""")

# (one, many)
ITEMS = tuple(pair.split("/") for pair in _words("""
apple/apples bag/bags ball/balls basket/baskets bicycle/bicycles book/books bottle/bottles box/boxes
brush/brushes button/buttons camera/cameras candle/candles card/cards chair/chairs clock/clocks
coat/coats coin/coins cup/cups desk/desks drum/drums flag/flags fork/forks guitar/guitars hat/hats
jacket/jackets kettle/kettles key/keys lamp/lamps lemon/lemons map/maps mirror/mirrors nail/nails
needle/needles notebook/notebooks orange/oranges pen/pens pencil/pencils phone/phones pillow/pillows
plate/plates ring/rings rope/ropes scarf/scarves shirt/shirts shoe/shoes spoon/spoons stamp/stamps
table/tables ticket/tickets tile/tiles towel/towels toy/toys umbrella/umbrellas vase/vases
"""))

FOODS = _words("""
bread soup rice pasta salad pizza cheese fish chicken beans cake pancakes noodles stew omelette pie
""")
ANIMALS = _words("""
cat dog horse cow sheep goat rabbit mouse parrot turtle hamster duck goose donkey pony snake frog
""")
WEATHER = _words("sunny cloudy rainy windy snowy foggy stormy clear")
GENRES = _words("jazz rock folk opera blues soul classical disco country metal")
SUBJECTS = _words("history music physics chemistry biology geography drawing algebra poetry sport")
JOBS = _words("""
baker doctor teacher farmer lawyer nurse painter pilot plumber sailor singer tailor waiter writer
driver gardener engineer chemist dentist actor
""")
VEHICLES = _words("car bus train truck van tram ferry plane bicycle taxi")
