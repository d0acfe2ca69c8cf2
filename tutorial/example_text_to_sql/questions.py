"""What is asked of the shop: families of questions, each with its query, wordings for training and
held-out wordings.

`SEEN` are learnt from demonstrations, `NEW` by rewards alone, `UNSEEN` never. Held-out questions
have other wordings, and other values where there are enough.
"""

from __future__ import annotations

import random

import shop
from families import SEEN
from wordings import Family, family

__all__ = ["FAMILIES", "NEW", "SEEN", "UNSEEN", "Family", "draw_values"]


NEW = {
    "city_stars": family(
        "select avg(reviews.stars) from reviews join customers on customers.id ="
        " reviews.customer_id where customers.city = '{city}' and customers.age > {age}",
        """How many stars do {city} customers <over> {age} give on average?
        <ask> the <mean> stars in reviews by customers <from> {city} [who are|that are] <over> {age}.
        Customers in {city} <over> {age}: <ask> the <mean> of the stars in their reviews?
        <ask> the <mean> rating [by|from] customers <from> {city} [aged over|<over>] {age}?
        How do {city} customers <over> {age} rate, on average, in stars?
        On average, how many stars do customers <over> {age} in {city} give?
        <ask> the <mean> number of stars [given by|in reviews by] {city} customers <over> {age}?
        On average, what star rating do <buyers> from {city} aged [over|above|more than] {age} [leave|give|award]?
        [Average|Mean] [review stars|stars per review], customers in {city}, age [over|above|more than] {age}.
        Could you <fetch> the <mean> star rating [left|given|awarded] by {city} <buyers> <over> {age}[, please|]?
        <take> the reviews written by customers who live in {city} and are <over> {age}. What is the <mean> star rating?
        How [well|generously|highly] do customers <over> {age} <from> {city} rate [us|things] on average, in stars?
        Among reviewers based in {city} whose age is [above|greater than] {age}, what is the <mean> of the stars?
        Only counting <buyers> older than {age}, what is the <mean> star [rating|score] given in reviews from {city}?
        Avg stars of reviews where the customer's city is {city} and the customer's age is over {age}[, please|].
        {city} customers, [older than|over|above] {age}: [average stars in their reviews|mean of their review stars]?
        I'd like to <known> how many stars a review has on average when it comes from a {city} customer <over> {age}.
        When somebody from {city} who is [past|over] {age} reviews a product, how many stars is that on average?
        Average the stars in all reviews by <buyers> with an age over {age} whose city is {city}.""",
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
        <names> the {k} oldest customers <from> {city}<down>.
        Could you [look up|fetch|pull up] the {k} oldest [shoppers|buyers|clients] <from> {city}[, please|]?
        In {city}, [which|what] {k} <buyers> are the furthest along in years?
        {city} customers, oldest first, names only, [limit|max|no more than] {k}.
        <take> all <buyers> who live in {city}. Who are the {k} <eldest> of them?
        I'd like the names of our {k} eldest <buyers> in {city}, the oldest one first.
        Top {k} by age among [our|the] {city} <buyers>: [who are they?|what are their names?|names only.]
        <put> the <buyers> based in {city} from oldest to youngest and <return> only the first {k} names.
        Starting from the <eldest> and working down in age, <return> {k} <buyers> from {city}.
        Who [leads|tops|heads] the list of {city} customers by age? <return> the first {k} names, oldest to youngest.
        {k} names, please: the <eldest> <buyers> we have in {city}[, by descending age|, the oldest at the top|].
        We want to [congratulate|write to|invite] our {k} oldest <buyers> in {city}. What are they called?
        Names of customers where the city is {city}, age descending, [only the first|limited to] {k} rows.
        Out of [all the|the] people [living|located] in {city} who shop here, who are the {k} with the highest age?
        Can you tell me who, [among|out of] our {city} [clientele|customer base], are the {k} <eldest><down>?
        By age, who makes [the|our] top {k} of customers in {city}, counting from the oldest?
        Whose age is the <largest> among {city} customers? <return> {k} names, starting [with|from] the oldest.
        For {city}: customer names [ordered|sorted|arranged] by age [desc|descending], [limit|top|first] {k}.
        Leave out the younger ones: I only want to know what the {k} <eldest> customers <from> {city} are called.""",
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
        <names> the {k} <best> <staff> [among|with|of] role {role}<down>.
        Could you <fetch> which {k} <staff> [working|employed|hired] as {role} [earn the most|take home the most]?
        Role {role}: top {k} [earners|by salary|by pay], names only[, please|].
        Who earns the most money among those employed as {role}? <return> the first {k} names, highest salary first.
        I'd like the names of the {k} top earners [in|within] the {role} role, biggest salary first.
        Names of employees [where role is|with role] {role}, salary [desc|descending], [limit|first] {k}.
        <take> [everyone|all the staff] whose [job|role|position] is {role}. Who are the {k} with the highest pay?
        {k} names, please: the {role} <staff> [we pay the most|on the highest salaries][, in descending order|].
        Among our {role} <staff>, who are the {k} that [cost us the most in salary|get paid the most]<down>?
        We are reviewing [pay|salaries] for the {role} position. Which {k} <staff> are at the top of the pay scale?
        Going down from the <largest> salary, <return> {k} <staff> [who work as|with the job of] {role}.
        <put> everyone in the role of {role} from best to worst paid and <return> only the first {k} names.
        By salary, who makes up the top {k} of [our employees|the staff] in the {role} [role|job|position]?""",
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
        "select avg(products.price) from products join suppliers on suppliers.id ="
        " products.supplier_id where suppliers.country = '{country}' and products.price > {price}",
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
        "select payments.method, count(*) from payments join orders on orders.id ="
        " payments.order_id where orders.year = {year} and payments.amount > {amount} group by"
        " payments.method",
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
