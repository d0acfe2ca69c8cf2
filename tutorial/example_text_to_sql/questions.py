"""What is asked of the shop: families of questions, each with its query, wordings for training and held-out wordings.

`SEEN` are learnt from demonstrations, `NEW` by rewards alone, `UNSEEN` never. Held-out questions have other wordings,
and other values where there are enough.
"""

from __future__ import annotations

import random
import string
from dataclasses import dataclass

import shop

__all__ = ["FAMILIES", "NEW", "SEEN", "UNSEEN", "Family", "draw_values"]


@dataclass(frozen=True)
class Family:
    query: str
    training: tuple[str, ...]
    held_out: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        return [name for _, name, _, _ in string.Formatter().parse(self.query) if name]


def family(query: str, training: str, held_out: str) -> Family:
    def lines(text: str) -> tuple[str, ...]:
        return tuple(line.strip() for line in text.strip().splitlines())

    return Family(query, lines(training), lines(held_out))


_CUSTOMER = "join customers on customers.id = orders.customer_id"
_PRODUCT = "join products on products.id = {}.product_id where products.name = '{{product}}'"
SEEN = {
    "count_city": family(
        "select count(*) from customers where city = '{city}'",
        """How many customers live in {city}?
        Count the customers in {city}.
        I need the number of our customers who come from {city}.
        {city}: how many people there are customers of ours?
        In {city}, how many customers do we have?
        How large is the group of customers living in {city}?
        Size of our customer base in {city}?
        Give me a count of everybody from {city} who is a customer.""",
        """What is the number of customers based in {city}?
        Tell me how big our clientele in {city} is, as a count of customers.""",
    ),
    "older": family(
        "select name from customers where city = '{city}' and age > {age}",
        """Which customers in {city} are older than {age}?
        Names of the customers from {city} whose age is over {age}.
        List everybody in {city} who is a customer and above {age}.
        Who of our {city} customers has passed the age of {age}?
        Customers of {city} aged over {age}: their names?
        Name every customer in {city} with more than {age} years.
        I want to write to customers from {city} older than {age}: what are they called?
        In {city}, who among the customers is over {age}?""",
        """Give the names of {city} customers whose age is more than {age}.
        Show all the customers living in {city} that are beyond {age} years.""",
    ),
    "cheap": family(
        "select name from products where category = '{cat}' and price < {price}",
        """Which {cat} cost less than {price}?
        List the names of all {cat} that are cheaper than {price}.
        I have {price} at most, and want {cat} below that: which ones are there?
        Show products among the {cat} with a price under {price}.
        Names of the {cat} that can be had for under {price}?
        Which of our {cat} do we sell for below {price}?
        My budget is {price}. Name all {cat} that cost less.
        Look for {cat} with prices smaller than {price} and list their names.""",
        """What {cat} can I get for less than {price}?
        Find every one of the {cat} priced lower than {price}, by name.""",
    ),
    "avg_price": family(
        "select avg(price) from products where category = '{cat}'",
        """What is the average price of {cat}?
        How much do {cat} cost on average?
        Take all {cat} together: what is their mean price?
        Average over the prices of our {cat}, please.
        Mean price over all {cat}?
        What do {cat} go for, on average?
        Compute the average of what {cat} cost.
        I would like to know the average price of our {cat}.""",
        """On average, what do we charge for {cat}?
        Give me the mean cost that customers see for {cat}.""",
    ),
    "top_price": family(
        "select name from products where category = '{cat}' order by price desc limit {k}",
        """The {k} most expensive {cat}?
        List the {k} {cat} with the highest price, from the top.
        Which {k} {cat} cost most? Dearest first.
        Rank the {cat} by price, downwards, and name the first {k}.
        Give me the names of the {k} dearest {cat}, beginning with the dearest.
        Sort {cat} from expensive to cheap; what are the first {k}?
        Top {k} among the {cat} by price, highest first.
        Of all {cat}, which {k} have the biggest price? In descending order.""",
        """Name the {k} priciest {cat}, in descending order of price.
        Show me which {k} of the {cat} are most expensive, highest price first.""",
    ),
    "status_year": family(
        "select count(*) from orders where status = '{status}' and year = {year}",
        """How many orders of {year} were {status}?
        Count the {status} orders in {year}.
        Of what was ordered in {year}, how many orders have status {status}?
        {year}: number of orders that are marked {status}.
        What count of orders placed in {year} is {status}?
        During {year}, how many orders ended up {status}?
        How many of the orders from {year} are {status} ones?
        Give the number of {status} orders for the year {year}.""",
        """In {year}, what number of orders were {status}?
        Tell me how many orders got {status} during the year {year}.""",
    ),
    "per_status": family(
        "select status, count(*) from orders where year = {year} group by status",
        """How many orders per status in {year}?
        Count the orders of {year} by status.
        For each status, the number of orders that we had in {year}.
        Orders in {year}: show every status with its count.
        Group the orders of {year} by status and count them.
        How do the orders of {year} split up by status?
        Status by status, how many orders did {year} bring?
        Number of orders in {year}, per status.""",
        """For every status, how many orders were there in {year}?
        Break the {year} orders down by status.""",
    ),
    "by_name": family(
        f"select count(*) from orders {_CUSTOMER} where customers.name = '{{name}}'",
        """How many orders did {name} place?
        Count the orders that belong to {name}.
        How often did our customer {name} order something?
        {name} is a customer: what is the number of orders?
        Number of orders from {name}?
        How many times did {name} buy from us, counted in orders?
        Give me the order count of the customer {name}.
        Look up {name} and count the orders.""",
        """What is the number of orders made by {name}?
        Tell me how many times {name} has placed an order.""",
    ),
    "sold": family(
        f"select sum(items.quantity) from items {_PRODUCT.format('items')}",
        """How many units of the {product} were sold?
        Total quantity sold of the product {product}.
        Add up all ordered items: how many are the {product}?
        The {product}: how many pieces did customers buy altogether?
        How often was the {product} sold, in pieces?
        Number of units that we sold of the {product}?
        What is the sum of ordered quantities for the {product}?
        Sales of the {product}, in units?""",
        """What total quantity of the {product} has been sold?
        Tell me how many pieces of the {product} went over the counter.""",
    ),
    "stars": family(
        f"select avg(reviews.stars) from reviews {_PRODUCT.format('reviews')}",
        """What is the average rating of the {product}?
        How many stars does the {product} get on average?
        Reviews of the {product}: their mean number of stars.
        Average stars that reviewers gave the {product}.
        Mean star rating for the {product}?
        How do reviewers rate the {product}, on average?
        What is the mean of the stars in reviews of the {product}?
        Tell me the average number of stars given to the {product}.""",
        """How well is the {product} rated on average, in stars?
        Give the mean over the review stars for the {product}.""",
    ),
    "per_city": family(
        "select city, count(*) from customers where age > {age} group by city",
        """How many customers over {age} per city?
        Count customers older than {age} by city.
        For each city, give the number of customers who are above {age}.
        Show cities with how many of their customers passed {age}.
        Number of customers aged above {age}, by city.
        In each city, how many of our customers are over {age}?
        Group customers older than {age} by city, with counts.
        City by city: how many customers have more than {age} years?""",
        """Per city, how many customers are more than {age} years old?
        Break down the customers beyond age {age} by city.""",
    ),
    "city_year": family(
        f"select count(*) from orders {_CUSTOMER} where customers.city = '{{city}}' and orders.year = {{year}}",
        """How many orders came from customers in {city} in {year}?
        Count the {year} orders of people who live in {city}.
        Number of orders that our {city} customers placed in {year}?
        Customers of {city} ordered how many times during {year}?
        How many orders did we get from {city} customers in {year}?
        Orders in {year} by customers from {city}: how many?
        During {year}, how often did customers living in {city} order?
        For {year}, count what customers from {city} ordered, in orders.""",
        """What number of orders did customers in {city} make in the course of {year}?
        In {year}, how many orders are from {city} customers?""",
    ),
    "max_salary": family(
        "select max(salary) from employees where role = '{role}' and store_id = {store}",
        """What is the highest salary of a {role} in store {store}?
        Store {store}: how much does the best paid {role} earn?
        Find the maximum salary among employees with role {role} in store number {store}.
        How much does a {role} in store {store} get at most?
        Among everyone who is {role} in store {store}, what is the largest salary?
        Maximum pay of a {role} working in store {store}?
        What salary has the best paid {role} of store {store}?""",
        """In store {store}, what is the most that any {role} earns?
        Give me the top salary for the role {role} at store {store}.""",
    ),
    "supplied": family(
        "select products.name from products join suppliers on suppliers.id = products.supplier_id "
        "where suppliers.country = '{country}' and products.price < {price}",
        """Which products below {price} come from suppliers in {country}?
        Names of products that cost less than {price} and have a supplier in {country}.
        {country} has suppliers of ours: list their products under {price}.
        Name the products under {price} that a supplier from {country} delivers.
        Which products from {country} suppliers cost less than {price}?
        Our suppliers in {country}: what products of theirs are priced below {price}?
        List products with a price under {price} whose supplier is in {country}.
        What can we get from suppliers in {country} for less than {price}? Names only.""",
        """What do suppliers from {country} sell us at a price lower than {price}? Product names.
        Show products whose supplier sits in {country} and that are cheaper than {price}.""",
    ),
    "in_stock": family(
        f"select sum(stock.quantity) from stock {_PRODUCT.format('stock')}",
        """How many of the {product} are in stock in all stores?
        Total stock of the product {product}.
        Add up over the stores what is left of the {product}.
        The {product}: how many pieces lie in stock altogether?
        How many pieces of the {product} do we have left, all stores together?
        Sum of the stock of the {product} across stores?
        What is our whole stock of the {product}?
        Over all stores, how many units of the {product} are there in stock?""",
        """What quantity of the {product} do all our stores have in stock?
        Tell me the stock of the {product}, over all stores.""",
    ),
    "paid_by": family(
        "select sum(payments.amount) from payments join orders on orders.id = payments.order_id "
        "where payments.method = '{method}' and orders.year = {year}",
        """How much was paid by {method} for orders of {year}?
        Sum of the payments with method {method} for what was ordered in {year}.
        Orders in {year}: what is the total amount that came in by {method}?
        What is the sum of {method} payments for orders of {year}?
        Money that came in by {method} for the orders of {year}?
        How much did customers pay by {method} on orders from {year}, in total?
        Add up the {method} payments belonging to orders of {year}.""",
        """What total amount did we receive by {method} for {year} orders?
        For orders of the year {year}, add up the payments made by {method}.""",
    ),
    "staff": family(
        "select count(*) from employees join stores on stores.id = employees.store_id "
        "where stores.city = '{city}' and employees.salary > {salary}",
        """How many employees of the store in {city} earn more than {salary}?
        Count the staff in the {city} store with a salary above {salary}.
        {city} has a store: how many people working there get over {salary}?
        How many people employed in the {city} store make more than {salary}?
        Number of employees with a salary over {salary} in the store of {city}?
        In our {city} store, how many of the staff are paid above {salary}?
        At the store in {city}, how many employees have a salary higher than {salary}?""",
        """What is the number of employees at our store in {city} whose salary exceeds {salary}?
        Tell me how many of the people in the {city} store have a salary beyond {salary}.""",
    ),
    "reviews_by": family(
        "select count(*) from reviews join customers on customers.id = reviews.customer_id "
        "where customers.name = '{name}'",
        """How many reviews did {name} write?
        Count the reviews that come from {name}.
        Number of reviews by the customer {name}?
        How often has {name} reviewed something?
        {name} writes reviews: how many are there?
        Look up the reviewer {name} and count the reviews.
        How many products did {name} review?""",
        """What is the number of reviews written by {name}?
        Tell me how many reviews we have got from {name}.""",
    ),
    "earns": family(
        "select name from employees where role = '{role}' and salary > {salary}",
        """Which employees with the role {role} earn more than {salary}?
        Names of everybody with role {role} whose salary is over {salary}.
        List each {role} with a salary above {salary}.
        Who works as {role} and gets more than {salary}?
        Employees who are {role} and paid over {salary}: their names?
        Name every {role} that makes more than {salary}.
        I look for people with role {role} on a salary of more than {salary}.""",
        """What are the names of employees of role {role} whose pay is beyond {salary}?
        Show me who among those employed as {role} has a salary higher than {salary}.""",
    ),
    "city_age": family(
        "select avg(age) from customers where city = '{city}'",
        """How old are customers in {city} on average?
        Average age of the customers from {city}?
        What is the mean age of our {city} customers?
        Take all customers in {city}: what is their average age?
        Compute the average age of people in {city} who are customers.
        Customers of {city}: mean of their ages?""",
        """On average, what age do the customers living in {city} have?
        Give me the mean over the ages of {city} customers.""",
    ),
}
NEW = {
    "city_stars": family(
        "select avg(reviews.stars) from reviews join customers on customers.id = reviews.customer_id "
        "where customers.city = '{city}' and customers.age > {age}",
        """How many stars do {city} customers over {age} give on average?
        Average stars in reviews by customers from {city} who are older than {age}.
        Customers in {city} above {age}: what is the mean of the stars in their reviews?
        What is the average rating by customers of {city} aged over {age}?
        How do {city} customers older than {age} rate, on average, in stars?
        Mean stars given by {city} customers with more than {age} years?
        Take the reviews of customers in {city} above {age}: average stars?""",
        """What is the mean rating from {city} customers of more than {age} years?
        On average, how many stars come from people in {city} beyond {age}?""",
    ),
    "oldest": family(
        "select name from customers where city = '{city}' order by age desc limit {k}",
        """The {k} oldest customers in {city}?
        Name the {k} customers of {city} with the highest age, oldest first.
        List our {city} customers by age, downwards; the first {k} names only.
        Who are the {k} oldest people that buy from us in {city}?
        Give the names of the {k} oldest customers from {city}, starting with the oldest.
        In {city}, which {k} customers have the most years? Oldest first.
        Customers of {city} sorted by age from the top: who are the first {k}?""",
        """Which {k} customers in {city} are oldest, in descending order of age?
        Top {k} of the {city} customers by age, names from the oldest on.
        Sort the people who buy in {city} from old to young and tell me the first {k}.
        Of everybody we serve in {city}, give the {k} with the greatest age, starting at the top.
        I want {k} names: the most senior customers that {city} has, eldest first.""",
    ),
    "best_paid": family(
        "select name from employees where role = '{role}' order by salary desc limit {k}",
        """The {k} best paid employees with the role {role}?
        Name the {k} employees who are {role} and have the highest salary, highest first.
        Rank everybody with role {role} by salary, downwards, and give the first {k} names.
        Who are the {k} employees of role {role} with the best pay, best first?
        Give me the {k} highest paid among role {role}, by name and from the top.
        Employees who work as {role}, sorted by salary from the top: the first {k} names?
        Which {k} people with role {role} have the biggest salary, in descending order?""",
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
        """What do products above {price} cost on average, if their supplier is from {country}?
        Mean price of what suppliers in {country} deliver, counting only products beyond {price}.
        {country} suppliers: the average price of those of their products that cost more than {price}?""",
    ),
    "store_year": family(
        "select count(*) from orders join stores on stores.id = orders.store_id "
        "where stores.city = '{city}' and orders.year = {year}",
        "How many orders did the store in {city} take in {year}?",
        """What is the number of orders at our {city} store in {year}?
        In {year}, how many orders went through the store that we have in {city}?
        Count what the {city} store handled in {year}, in orders.""",
    ),
    "per_method": family(
        "select payments.method, count(*) from payments join orders on orders.id = payments.order_id "
        "where orders.year = {year} and payments.amount > {amount} group by payments.method",
        "How many payments over {amount} per method for orders of {year}?",
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
        "k": [4, 7, 8] if held_out else [2, 3, 5, 6],
        "year": _part([*shop.YEARS], held_out=held_out),
        "status": [*shop.STATUSES],
        "method": [*shop.METHODS],
        "role": [*shop.ROLES],
        "country": [*shop.COUNTRIES],
    }
    return {name: draw.choice(known[name]) for name in names}
