"""The families of questions that are demonstrated: each has its query, wordings for training and held-out wordings."""

from __future__ import annotations

import string
from dataclasses import dataclass

__all__ = ["SEEN", "Family", "family"]


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
    "low_price": family(
        "select name from products where category = '{cat}' order by price limit {k}",
        """The {k} cheapest {cat}?
        List the {k} {cat} with the lowest price, from the bottom.
        Which {k} {cat} cost least? Cheapest first.
        Rank the {cat} by price, upwards, and name the first {k}.
        Give me the names of the {k} cheapest {cat}, beginning with the cheapest.
        Sort {cat} from cheap to expensive; what are the first {k}?
        Bottom {k} among the {cat} by price, lowest first.
        Of all {cat}, which {k} have the smallest price? In ascending order.""",
        """Name the {k} {cat} that cost the least, in ascending order of price.
        Show me which {k} of the {cat} are cheapest, lowest price first.""",
    ),
    "store_paid": family(
        "select name from employees where store_id = {store} order by salary desc limit {k}",
        """The {k} best paid employees of store {store}?
        Name the {k} employees of store {store} with the highest salary, highest first.
        Rank everybody in store {store} by salary, downwards, and give the first {k} names.
        Who are the {k} people in store {store} with the best pay, best first?
        Give me the {k} highest paid in store {store}, by name and from the top.
        Employees of store {store}, sorted by salary from the top: the first {k} names?
        Which {k} employees in store {store} have the biggest salary, in descending order?
        Sort the staff of store {store} from high to low salary; who are the first {k}?""",
        """Which {k} people in store {store} earn most, in descending order of salary?
        Show me the names of the {k} top earners at store {store}, highest salary first.""",
    ),
    "store_low": family(
        "select name from employees where store_id = {store} order by salary limit {k}",
        """The {k} worst paid employees of store {store}?
        Name the {k} employees of store {store} with the lowest salary, lowest first.
        Rank everybody in store {store} by salary, upwards, and give the first {k} names.
        Who are the {k} people in store {store} with the smallest pay, smallest first?
        Give me the {k} lowest paid in store {store}, by name and from the bottom.
        Employees of store {store}, sorted by salary from the bottom: the first {k} names?
        Which {k} employees in store {store} have the smallest salary, in ascending order?
        Sort the staff of store {store} from low to high salary; who are the first {k}?""",
        """Which {k} people in store {store} earn least, in ascending order of salary?
        Show me the names of the {k} with the least pay at store {store}, lowest salary first.""",
    ),
    "top_ages": family(
        "select age from customers where city = '{city}' order by age desc limit {k}",
        """How old are the {k} oldest customers in {city}?
        The {k} highest ages among customers in {city}, highest first.
        List the ages of our {city} customers, downwards; the first {k} only.
        What are the ages of the {k} oldest people that buy from us in {city}?
        Give the ages of the {k} oldest customers from {city}, starting with the highest.
        Which {k} ages are the highest in {city} among customers? In descending order.
        Sort the ages of customers in {city} from old to young; what are the first {k}?
        Ages of customers of {city}, sorted from the top: the first {k}?""",
        """What are the {k} greatest ages of customers in {city}, in descending order?
        Show me how old the {k} oldest of the {city} customers are, highest age first.""",
    ),
    "low_ages": family(
        "select age from customers where city = '{city}' order by age limit {k}",
        """How old are the {k} youngest customers in {city}?
        The {k} lowest ages among customers in {city}, lowest first.
        List the ages of our {city} customers, upwards; the first {k} only.
        What are the ages of the {k} youngest people that buy from us in {city}?
        Give the ages of the {k} youngest customers from {city}, starting with the lowest.
        Which {k} ages are the lowest in {city} among customers? In ascending order.
        Sort the ages of customers in {city} from young to old; what are the first {k}?
        Ages of customers of {city}, sorted from the bottom: the first {k}?""",
        """What are the {k} smallest ages of customers in {city}, in ascending order?
        Show me how old the {k} youngest of the {city} customers are, lowest age first.""",
    ),
    "name_stars": family(
        "select avg(reviews.stars) from reviews join customers on customers.id = reviews.customer_id "
        "where customers.name = '{name}'",
        """How many stars does {name} give on average?
        What is the average rating by the customer {name}?
        Average stars in the reviews that {name} wrote.
        Reviews by {name}: what is the mean of their stars?
        How does {name} rate, on average, in stars?
        Mean stars given by {name}?
        Take the reviews of the customer {name}: average stars?""",
        """What is the mean rating that comes from {name}?
        On average, how many stars are there in the reviews of {name}?""",
    ),
    "city_reviews": family(
        "select count(*) from reviews join customers on customers.id = reviews.customer_id "
        "where customers.city = '{city}' and customers.age > {age}",
        """How many reviews did {city} customers over {age} write?
        Count the reviews by customers from {city} who are older than {age}.
        Customers in {city} above {age}: what is the number of their reviews?
        Number of reviews by customers of {city} aged over {age}?
        How often did {city} customers older than {age} review something?
        Reviews from {city} customers with more than {age} years: how many are there?
        Take the customers in {city} above {age}: how many reviews have they written?""",
        """What is the number of reviews from {city} customers of more than {age} years?
        Tell me how many reviews come from people in {city} beyond {age}.""",
    ),
}
