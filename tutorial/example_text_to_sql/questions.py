"""What is asked of the shop: families of questions, each with its query, wordings for training and held-out wordings.

`SEEN` are learnt from demonstrations, `NEW` by rewards alone, `UNSEEN` never. Held-out questions have other wordings,
and other values where there are enough.
"""

from __future__ import annotations

import random

import shop
from families import SEEN
from wordings import Family, family

__all__ = ["FAMILIES", "NEW", "SEEN", "UNSEEN", "Family", "draw_values"]


NEW = {
    "city_stars": family(
        "select avg(reviews.stars) from reviews join customers on customers.id = reviews.customer_id "
        "where customers.city = '{city}' and customers.age > {age}",
        """How many stars do {city} customers <over> {age} give on average?
        <ask> the <mean> stars in reviews by customers <from> {city} [who are|that are] <over> {age}.
        Customers in {city} <over> {age}: <ask> the <mean> of the stars in their reviews?
        <ask> the <mean> rating [by|from] customers <from> {city} [aged over|<over>] {age}?
        How do {city} customers <over> {age} rate, on average, in stars?
        On average, how many stars do customers <over> {age} in {city} give?
        <ask> the <mean> number of stars [given by|in reviews by] {city} customers <over> {age}?""",
        """Mean stars given by {city} customers with more than {age} years?
        Take the reviews of customers in {city} above {age}: average stars?""",
        """What is the mean rating from {city} customers of more than {age} years?
        On average, how many stars come from people in {city} beyond {age}?""",
    ),
    "oldest": family(
        "select name from customers where city = '{city}' order by age desc limit {k}",
        """The {k} oldest customers <from> {city}<down>?
        <list> the {k} customers <from> {city} with the <largest> age<down>.
        <sort> [our {city} customers|the customers in {city}] by age, [downwards|descending], and name the first {k}.
        Who are the {k} oldest [people that buy from us|customers] in {city}<down>?
        Customers <from> {city}, sorted by age from [the top|high to low]: the first {k} names?
        Which {k} customers <from> {city} [have the <largest> age|have the most years|are the oldest]<down>?
        <names> the {k} oldest customers <from> {city}<down>.""",
        """Give me the {k} oldest in {city} among our customers, by name and from the top.
        Of all our customers in {city}, name the {k} who are oldest, from old to young.""",
        """Which {k} customers in {city} are oldest, in descending order of age?
        Top {k} of the {city} customers by age, names from the oldest on.
        Sort the people who buy in {city} from old to young and tell me the first {k}.
        Of everybody we serve in {city}, give the {k} with the greatest age, starting at the top.
        I want {k} names: the most senior customers that {city} has, eldest first.""",
    ),
    "best_paid": family(
        "select name from employees where role = '{role}' order by salary desc limit {k}",
        """The {k} <best> <staff> with the role {role}<down>?
        <list> the {k} employees [who are {role} and have|of role {role} with] the <largest> [salary|pay]<down>.
        <sort> [everybody|the employees] with role {role} by salary, [downwards|descending], and name the first {k}.
        Who are the {k} <staff> [of|with] role {role} with the <largest> [pay|salary]<down>?
        [Employees|People] who work as {role}, sorted by salary from [the top|high to low]: the first {k} names?
        Which {k} <staff> with [the |]role {role} [have the <largest> salary|get the most money|are paid best]<down>?
        <names> the {k} <best> <staff> [among|with|of] role {role}<down>.""",
        """Give me the {k} highest paid among role {role}, by name and from the top.
        Of all employees with the role {role}, name the {k} who are best paid, from high to low.""",
        """Which {k} of those who work as {role} earn most, in descending order of salary?
        Top {k} salaries among the role {role}: the names, from the best paid on.
        Sort employees of role {role} from high to low pay and tell me the first {k} names.
        Of everybody employed as {role}, give the {k} with the greatest salary, starting at the top.
        I want {k} names: those with role {role} whom we pay most, richest first.""",
    ),
}
UNSEEN = {
    "country_avg": family(
        "select avg(products.price) from products join suppliers on suppliers.id = products.supplier_id "
        "where suppliers.country = '{country}' and products.price > {price}",
        "What is the average price of products over {price} from suppliers in {country}?",
        "",
        """What do products above {price} cost on average, if their supplier is from {country}?
        Mean price of what suppliers in {country} deliver, counting only products beyond {price}.
        {country} suppliers: the average price of those of their products that cost more than {price}?""",
    ),
    "store_year": family(
        "select count(*) from orders join stores on stores.id = orders.store_id "
        "where stores.city = '{city}' and orders.year = {year}",
        "How many orders did the store in {city} take in {year}?",
        "",
        """What is the number of orders at our {city} store in {year}?
        In {year}, how many orders went through the store that we have in {city}?
        Count what the {city} store handled in {year}, in orders.""",
    ),
    "per_method": family(
        "select payments.method, count(*) from payments join orders on orders.id = payments.order_id "
        "where orders.year = {year} and payments.amount > {amount} group by payments.method",
        "How many payments over {amount} per method for orders of {year}?",
        "",
        """For each method, how many payments above {amount} belong to orders of {year}?
        Break down by method the payments of more than {amount} that were made for {year} orders.
        Orders of {year}: count the payments beyond {amount}, per method.""",
    ),
}
FAMILIES = {**SEEN, **NEW, **UNSEEN}


def _part(values: list[object], *, held_out: bool) -> list[object]:
    """One value in three is for held-out questions."""
    return [value for place, value in enumerate(values) if (place % 3 == 0) == held_out]


def draw_values(draw: random.Random, names: list[str], *, held_out: bool) -> dict[str, object]:
    known: dict[str, list[object]] = {
        "city": _part([*shop.CITIES], held_out=held_out),
        "age": _part([*range(20, 72)], held_out=held_out),
        "cat": _part([*shop.CATEGORIES], held_out=held_out),
        "price": _part([*range(40, 281, 4)], held_out=held_out),
        "amount": _part([*range(50, 850, 10)], held_out=held_out),
        "salary": _part([*range(2000, 5000, 50)], held_out=held_out),
        "name": _part([*shop.CUSTOMERS], held_out=held_out),
        "product": _part([name for name, _ in shop.PRODUCTS], held_out=held_out),
        "store": _part([*range(1, 13)], held_out=held_out),
        "k": [4, 7, 8] if held_out else [2, 3, 5, 6, 9, 10],
        "year": _part([*shop.YEARS], held_out=held_out),
        "status": [*shop.STATUSES],
        "method": [*shop.METHODS],
        "role": [*shop.ROLES],
        "country": [*shop.COUNTRIES],
    }
    return {name: draw.choice(known[name]) for name in names}
