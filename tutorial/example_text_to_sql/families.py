"""The families of questions that are demonstrated: query, wordings to train on, to tune on, and
held out."""

from __future__ import annotations

from wordings import family

__all__ = ["SEEN"]

_CUSTOMER = "join customers on customers.id = orders.customer_id"
_PRODUCT = "join products on products.id = {}.product_id where products.name = '{{product}}'"
SEEN = {
    "count_city": family(
        "select count(*) from customers where city = '{city}'",
        """<many> customers [live in|are from|come from|reside in] {city}?
        [Count|Please count] [the|our|all] customers [in|from|who live in] {city}.
        <ask> the <number> of [our|the] customers [in|from|who come from] {city}.
        [{city}: how many people there are|In {city}, how many people are] customers of ours?
        In {city}, how many customers [do we have|are there|can we count]?
        How [large|numerous] is our [group of customers|customer base] in {city}?
        [How many people in {city} buy from us|How many people from {city} are our customers]?""",
        """How large is the group of customers living in {city}?
        Give me a count of everybody from {city} who is a customer.""",
        """What is the number of customers based in {city}?
        Tell me how big our clientele in {city} is, as a count of customers.""",
    ),
    "older": family(
        "select name from customers where city = '{city}' and age > {age}",
        """Which [customers|of our customers] in {city} are <over> {age}?
        <names> [the|our|all] customers [from|in|living in] {city} [whose age is over|who are <over>|aged over] {age}.
        <list> [everybody|everyone|all people] in {city} who is a customer and <over> {age}.
        Who [of|among] our {city} customers [has passed the age of|is <over>] {age}?
        Customers <from> {city} [aged over|<over>|with an age above] {age}: [their names|what are their names]?
        <list> [every|each] customer <from> {city} [with more than {age} years|<over> {age}].
        For {city}, [name|list|give me] the customers [that|who] are <over> {age}[| years old].""",
        """I want to write to customers from {city} older than {age}: what are they called?
        In {city}, who among the customers is over {age}?""",
        """Give the names of {city} customers whose age is more than {age}.
        Show all the customers living in {city} that are beyond {age} years.""",
    ),
    "cheap": family(
        "select name from products where category = '{cat}' and price < {price}",
        """Which [|of our ]{cat} [cost|are priced|sell for] <under> {price}?
        <names> [all|the] {cat} [that are cheaper than|with a price <under>|that cost <under>|priced <under>] {price}.
        I have {price} at most, and want {cat} below that: which ones [are there|do you have]?
        <list> [all|the] products among the {cat} [with a price <under>|that cost <under>] {price}.
        <names> the {cat} that can be [had|bought] for <under> {price}?
        [What|Which] {cat} are there [below|under|for less than] {price}?
        [Are there {cat} <under> {price}|{price} is my limit]? [List|Name] the {cat} [below that|that cost less].""",
        """My budget is {price}. Name all {cat} that cost less.
        Look for {cat} with prices smaller than {price} and list their names.""",
        """What {cat} can I get for less than {price}?
        Find every one of the {cat} priced lower than {price}, by name.""",
    ),
    "avg_price": family(
        "select avg(price) from products where category = '{cat}'",
        """<ask> the <mean> price of [|our |all ]{cat}.
        How much do [|our ]{cat} cost on average?
        On average, [how much do {cat} cost|what is the price of {cat}|how expensive are {cat}]?
        Take all {cat} together: what is their <mean> price?
        [<mean>|The <mean>] [over|of] the prices of [our|all] {cat}[|, please]?
        <mean> price [over|of|across] all {cat}?
        What [do {cat} cost|must one pay for {cat}] on average?""",
        """What do {cat} go for, on average?
        Compute the average of what {cat} cost.""",
        """On average, what do we charge for {cat}?
        Give me the mean cost that customers see for {cat}.""",
    ),
    "top_price": family(
        "select name from products where category = '{cat}' order by price desc limit {k}",
        """The {k} [most expensive|dearest|costliest] {cat}<down>?
        <list> the {k} {cat} with the <largest> price<down>.
        Which {k} {cat} [cost most|are the most expensive|have the <largest> price]<down>?
        <sort> the {cat} by price, [downwards|descending], and [name|list|show] the first {k}.
        <names> the {k} [dearest|most expensive] {cat}<down>.
        [Top {k} among|The top {k} of] the {cat} by price, [highest first|descending|from expensive to cheap].
        <sort> {cat} from [expensive to cheap|dear to cheap]; [what are|name|list] the first {k}?""",
        """Give me the names of the {k} dearest {cat}, beginning with the dearest.
        Of all {cat}, which {k} have the biggest price? In descending order.""",
        """Name the {k} priciest {cat}, in descending order of price.
        Show me which {k} of the {cat} are most expensive, highest price first.""",
    ),
    "low_price": family(
        "select name from products where category = '{cat}' order by price asc limit {k}",
        """The {k} [cheapest|least expensive|most affordable] {cat}<up>?
        <list> the {k} {cat} with the <smallest> price<up>.
        Which {k} {cat} [cost least|are the cheapest|have the <smallest> price]<up>?
        <sort> the {cat} by price, [upwards|ascending], and [name|list|show] the first {k}.
        <names> the {k} [cheapest|least expensive] {cat}<up>.
        [Bottom {k} among|The bottom {k} of] the {cat} by price, [lowest first|ascending|from cheap to expensive].
        <sort> {cat} from [cheap to expensive|cheap to dear]; [what are|name|list] the first {k}?""",
        """Give me the names of the {k} cheapest {cat}, beginning with the cheapest.
        Of all {cat}, which {k} have the smallest price? In ascending order.""",
        """Name the {k} {cat} that cost the least, in ascending order of price.
        Show me which {k} of the {cat} are cheapest, lowest price first.""",
    ),
    "status_year": family(
        "select count(*) from orders where status = '{status}' and year = {year}",
        """<many> orders [of|from|in] {year} [were|are|have been] {status}?
        [Count|Please count] the {status} orders <from> {year}.
        Of [the orders from {year}|all {year} orders], how many [have the status|are|were] {status}?
        {year}: <number> of orders that are [marked |]{status}.
        <ask> the <number> of {status} orders [in|for the year|from|of] {year}.
        [During|In] {year}, how many orders [ended up|were|became] {status}?
        In {year}, <many> orders [had the status|with status|were] {status}?""",
        """What count of orders placed in {year} is {status}?
        How many of the orders from {year} are {status} ones?""",
        """In {year}, what number of orders were {status}?
        Tell me how many orders got {status} during the year {year}.""",
    ),
    "per_status": family(
        "select status, count(*) from orders where year = {year} group by status",
        """<many> orders [per status|by status|of each status] [in|were there in|did we have in] {year}?
        Count the orders <from> {year} [by status|per status|for each status].
        For [each|every] status, <ask> the <number> of orders [that we had in|in|of|from] {year}.
        Orders <from> {year}: [show|list|give] [every|each] status with its [count|number].
        [Group|Split] the [orders of {year}|{year} orders] by status and count them.
        How do the [orders of {year}|{year} orders] [split up|divide|spread] by status?
        <number> of orders in {year}, [per|by|for each] status.""",
        """How are the orders of {year} distributed over the statuses?
        Status by status, how many orders did {year} bring?""",
        """For every status, how many orders were there in {year}?
        Break the {year} orders down by status.""",
    ),
    "by_name": family(
        f"select count(*) from orders {_CUSTOMER} where customers.name = '{{name}}'",
        """<many> orders did {name} [place|make|give us]?
        [Count|Please count] the orders [that belong to|of|from|placed by] {name}.
        How [often|many times] did [our customer |]{name} [order something|buy from us|place an order]?
        {name} is a customer: <ask> the <number> of orders?
        <ask> the <number> of orders [from|of|by] [the customer |]{name}?
        <number> of orders [that |]{name} [placed|made]?
        <many> orders are [there |][from|by] {name}?""",
        """How many times did {name} buy from us, counted in orders?
        Look up {name} and count the orders.""",
        """What is the number of orders made by {name}?
        Tell me how many times {name} has placed an order.""",
    ),
    "sold": family(
        f"select sum(items.quantity) from items {_PRODUCT.format('items')}",
        """<many> [units|pieces] of the {product} [were sold|have we sold|did we sell|were ordered]?
        <ask> the total quantity [sold |ordered |]of the [product |]{product}.
        Add up [all ordered items|the quantities]: how many are the {product}?
        The {product}: how many [pieces|units] did customers buy [altogether|in total]?
        How often was the {product} sold, in [pieces|units]?
        <number> of [units|pieces] [that we sold |sold ]of the {product}?
        [Total|All] sales of the {product}, in [units|pieces]?""",
        """What is the sum of ordered quantities for the {product}?
        Sales of the {product}, in units?""",
        """What total quantity of the {product} has been sold?
        Tell me how many pieces of the {product} went over the counter.""",
    ),
    "stars": family(
        f"select avg(reviews.stars) from reviews {_PRODUCT.format('reviews')}",
        """<ask> the <mean> rating [of|for] the {product}.
        How many stars [does the {product} get|did the {product} receive|has the {product}] on average?
        Reviews of the {product}: [their|what is the] <mean> number of stars?
        <mean> [stars|number of stars] that [reviewers|customers] gave [to |]the {product}.
        <ask> the <mean> number of stars [of|for|given to] the {product}.
        How [do reviewers rate the {product}|is the {product} rated], on average?
        On average, [how many stars does the {product} have|how do reviewers rate the {product}]?""",
        """Mean star rating for the {product}?
        What is the mean of the stars in reviews of the {product}?""",
        """How well is the {product} rated on average, in stars?
        Give the mean over the review stars for the {product}.""",
    ),
    "per_city": family(
        "select city, count(*) from customers where age > {age} group by city",
        """<many> customers <over> {age} [per city|by city|in each city|are there in each city]?
        Count [the |our |]customers <over> {age} [by city|per city|for each city].
        For [each|every] city, <ask> the <number> of customers [who are|that are] <over> {age}.
        [Show|List] [the cities|each city] with [how many of their|the number of] customers <over> {age}.
        <number> of customers [aged above|<over>] {age}, [by|per|for each] city.
        In [each|every] city, how many [of our |]customers are <over> {age}?
        [Group|Split] [the |]customers <over> {age} by city[, with counts| and count them].""",
        """By city, how many customers passed {age}?
        City by city: how many customers have more than {age} years?""",
        """Per city, how many customers are more than {age} years old?
        Break down the customers beyond age {age} by city.""",
    ),
    "city_year": family(
        f"select count(*) from orders {_CUSTOMER} where customers.city = '{{city}}' and orders.year"
        " = {year}",
        """<many> orders [came|come|did we get] from customers in {city} in {year}?
        Count the {year} orders of [people who live in|customers in|customers from] {city}.
        <ask> the <number> of orders [from {city} customers|by customers in {city}] in {year}.
        Customers <from> {city} [ordered how many times|made how many orders] [during|in] {year}?
        How many orders did [our {city} customers|customers from {city}] [place|make] [in|during] {year}?
        Orders <from> {year} by customers <from> {city}: how many?
        [In|During] {year}, how [often|many times] did [customers living in {city}|{city} customers] order?""",
        """Number of orders that our {city} customers placed in {year}?
        For {year}, count what customers from {city} ordered, in orders.""",
        """What number of orders did customers in {city} make in the course of {year}?
        In {year}, how many orders are from {city} customers?""",
    ),
    "max_salary": family(
        "select max(salary) from employees where role = '{role}' and store_id = {store}",
        """<ask> the <largest> salary of a {role} <at> store {store}?
        Store {store}: how much does the best paid {role} [earn|get|make]?
        [Find|Give me|Show] the maximum salary among employees with [role|the role] {role} <at> store [number |]{store}.
        How much does a {role} <at> store {store} [get|earn|make] at most?
        In store {store}, [what is the <largest> salary of a {role}|how much does a {role} earn at most]?
        [Among everyone who is|Of those with the role] {role} in store {store}, what is the <largest> salary?
        [Maximum|<largest>] [pay|salary] [of|for] [a {role}|the role {role}] [working |]in store {store}?""",
        """Maximum pay of a {role} working in store {store}?
        What salary has the best paid {role} of store {store}?""",
        """In store {store}, what is the most that any {role} earns?
        Give me the top salary for the role {role} at store {store}.""",
    ),
    "supplied": family(
        "select products.name from products join suppliers on suppliers.id = products.supplier_id "
        "where suppliers.country = '{country}' and products.price < {price}",
        """Which products <under> {price} come from [suppliers in {country}|{country} suppliers]?
        <names> [the |]products [that cost |]<under> {price} [and have a supplier in|from suppliers in] {country}.
        {country} has suppliers of ours: list their products <under> {price}.
        <list> the products <under> {price} that [a supplier from {country} delivers|suppliers in {country} deliver].
        Which products [from {country} suppliers|of suppliers from {country}] cost <under> {price}?
        <list> products [with a price|that cost] <under> {price} [whose supplier is in|from suppliers in] {country}.
        What [can we get|do we buy] from suppliers in {country} for <under> {price}? [Names only|Name the products].""",
        """Our suppliers in {country}: what products of theirs are priced below {price}?
        Name everything cheaper than {price} whose supplier is from {country}.""",
        """What do suppliers from {country} sell us at a price lower than {price}? Product names.
        Show products whose supplier sits in {country} and that are cheaper than {price}.""",
    ),
    "paid_by": family(
        "select sum(payments.amount) from payments join orders on orders.id = payments.order_id "
        "where payments.method = '{method}' and orders.year = {year}",
        """How much [was paid|did customers pay|came in] by {method} for orders [of|from|in] {year}?
        <ask> the [sum|total] of [the payments with method|all payments by] {method} for orders of {year}.
        Orders <from> {year}: <ask> the total [amount|sum] [that came in|paid] by {method}?
        <ask> the [sum|total] of [the |]{method} payments for [orders of {year}|{year} orders]?
        [Add up|Sum] the {method} payments [belonging to|for|of] [orders of {year}|{year} orders].
        [In total|Altogether], how much [was paid|did we get] by {method} for [orders of {year}|{year} orders]?
        For [orders of {year}|{year} orders], how much was paid by {method}?""",
        """Money that came in by {method} for the orders of {year}?
        How much did customers pay by {method} on orders from {year}, in total?""",
        """What total amount did we receive by {method} for {year} orders?
        For orders of the year {year}, add up the payments made by {method}.""",
    ),
    "staff": family(
        "select count(*) from employees join stores on stores.id = employees.store_id "
        "where stores.city = '{city}' and employees.salary > {salary}",
        """<many> employees of the store in {city} [earn|make|get] <more> {salary}?
        Count the [staff|employees|people] in the {city} store [with a salary|who earn|paid] <more> {salary}.
        {city} has a store: how many people working there [get|earn|make] <more> {salary}?
        <many> people [employed|working] in the {city} store [make|earn|get] <more> {salary}?
        <ask> the <number> of employees [with a salary|who earn] <more> {salary} in the [store of {city}|{city} store].
        In [our|the] {city} store, how many [of the staff|employees] [are paid|earn|get] <more> {salary}?
        [At|In] the store <from> {city}, how many employees have a salary <more> {salary}?""",
        """Number of people paid over {salary} who work in the store of {city}?
        How many of the {city} store's staff have salaries above {salary}?""",
        """What is the number of employees at our store in {city} whose salary exceeds {salary}?
        Tell me how many of the people in the {city} store have a salary beyond {salary}.""",
    ),
    "reviews_by": family(
        "select count(*) from reviews join customers on customers.id = reviews.customer_id "
        "where customers.name = '{name}'",
        """<many> reviews did [the customer |]{name} [write|give|post]?
        [Count|Please count] the reviews [that come from|of|by|written by] {name}.
        <ask> the <number> of reviews [by|from] [the customer |]{name}?
        How [often|many times] did {name} review [something|a product|our products]?
        {name} [writes reviews|reviews products]: how many [are there|reviews are there]?
        <many> [reviews are there|reviews do we have] [by|from] {name}?
        <number> of reviews [that |]{name} [wrote|has written]?""",
        """Look up the reviewer {name} and count the reviews.
        How many products did {name} review?""",
        """What is the number of reviews written by {name}?
        Tell me how many reviews we have got from {name}.""",
    ),
    "earns": family(
        "select name from employees where role = '{role}' and salary > {salary}",
        """Which employees with the role {role} [earn|make|get] <more> {salary}?
        <names> [all|the] employees with [the |]role {role} [whose salary is|who earn|on a salary of] <more> {salary}.
        <list> [each|every] {role} [with a salary|who earns|who is paid] <more> {salary}.
        Who works as {role} and [gets|earns|makes] <more> {salary}?
        [Employees|People] [who are|employed as|of role] {role} and paid <more> {salary}: [their|what are their] names?
        [Among|Of] [the employees|those] with role {role}, who [earns|gets|is paid] <more> {salary}?
        <names> those [who work|working] as {role} [with a pay of|for a salary of|who get] <more> {salary}.""",
        """Name every {role} that makes more than {salary}.
        I look for people with role {role} on a salary of more than {salary}.""",
        """What are the names of employees of role {role} whose pay is beyond {salary}?
        Show me who among those employed as {role} has a salary higher than {salary}.""",
    ),
    "store_paid": family(
        "select name from employees where store_id = {store} order by salary desc limit {k}",
        """The {k} <best> <staff> <at> store {store}<down>?
        <list> the {k} employees <at> store {store} with the <largest> [salary|pay]<down>.
        <sort> [everybody|the staff] <from> store {store} by salary, [downwards|descending], and name the first {k}.
        Who are the {k} <staff> in store {store} with the <largest> [pay|salary]<down>?
        [Employees|Staff|People] of store {store}, sorted by salary from [the top|high to low]: the first {k} names?
        Which {k} <staff> <at> store {store} [have the <largest> salary|get the most money|are paid best]<down>?
        <names> the {k} <best> <staff> <at> store {store}<down>.""",
        """Give me the {k} highest paid in store {store}, by name and from the top.
        Sort the staff of store {store} from high to low salary; who are the first {k}?""",
        """Which {k} people in store {store} earn most, in descending order of salary?
        Show me the names of the {k} top earners at store {store}, highest salary first.""",
    ),
    "store_low": family(
        "select name from employees where store_id = {store} order by salary asc limit {k}",
        """The {k} <worst> <staff> <at> store {store}<up>?
        <list> the {k} employees <at> store {store} with the <smallest> [salary|pay]<up>.
        <sort> [everybody|the staff] <from> store {store} by salary, [upwards|ascending], and name the first {k}.
        Who are the {k} <staff> in store {store} with the <smallest> [pay|salary]<up>?
        [Employees|Staff|People] of store {store}, sorted by salary from [the bottom|low to high]: the first {k} names?
        Which {k} <staff> <at> store {store} [have the <smallest> salary|get the least money|are paid worst]<up>?
        <names> the {k} <worst> <staff> <at> store {store}<up>.""",
        """Give me the {k} lowest paid in store {store}, by name and from the bottom.
        Sort the staff of store {store} from low to high salary; who are the first {k}?""",
        """Which {k} people in store {store} earn least, in ascending order of salary?
        Show me the names of the {k} with the least pay at store {store}, lowest salary first.""",
    ),
    "top_ages": family(
        "select age from customers where city = '{city}' order by age desc limit {k}",
        """How old are the {k} oldest [customers|of our customers] <from> {city}<down>?
        The {k} <largest> ages [among|of] customers <from> {city}<down>.
        <list> the ages of our {city} customers, [downwards|descending]; the first {k} only.
        What are the ages of the {k} oldest [people that buy from us|customers] in {city}<down>?
        [Give|Tell me|Show] the ages of the {k} oldest [customers from {city}|{city} customers]<down>.
        [Which|What] {k} ages are the <largest> in {city} among customers<down>?
        <sort> the ages of [our |]customers in {city} from [old to young|high to low]; [show|name] the first {k}.""",
        """The {k} oldest customers of {city}: how old are they? From the top.
        Ages of customers of {city}, sorted from the top: the first {k}?""",
        """What are the {k} greatest ages of customers in {city}, in descending order?
        Show me how old the {k} oldest of the {city} customers are, highest age first.""",
    ),
    "low_ages": family(
        "select age from customers where city = '{city}' order by age asc limit {k}",
        """How old are the {k} youngest [customers|of our customers] <from> {city}<up>?
        The {k} <smallest> ages [among|of] customers <from> {city}<up>.
        <list> the ages of our {city} customers, [upwards|ascending]; the first {k} only.
        What are the ages of the {k} youngest [people that buy from us|customers] in {city}<up>?
        [Give|Tell me|Show] the ages of the {k} youngest [customers from {city}|{city} customers]<up>.
        [Which|What] {k} ages are the <smallest> in {city} among customers<up>?
        <sort> the ages of [our |]customers in {city} from [young to old|low to high]; [show|name] the first {k}.""",
        """The {k} youngest customers of {city}: how old are they? From the bottom.
        Ages of customers of {city}, sorted from the bottom: the first {k}?""",
        """What are the {k} smallest ages of customers in {city}, in ascending order?
        Show me how old the {k} youngest of the {city} customers are, lowest age first.""",
    ),
    "name_stars": family(
        "select avg(reviews.stars) from reviews join customers on customers.id ="
        " reviews.customer_id where customers.name = '{name}'",
        """How many stars does [the customer |]{name} give on average?
        <ask> the <mean> rating [by|of|from] the customer {name}?
        <mean> [stars|number of stars] in the reviews [that {name} wrote|by {name}|written by {name}].
        Reviews [by|from] {name}: what is the <mean> of [their|the] stars?
        How does [the customer |]{name} rate, on average, in stars?
        On average, how many stars [does {name} give|did {name} give to products]?
        <ask> the <mean> number of stars [given by|that come from|in reviews by] {name}.""",
        """Mean stars given by {name}?
        Take the reviews of the customer {name}: average stars?""",
        """What is the mean rating that comes from {name}?
        On average, how many stars are there in the reviews of {name}?""",
    ),
    "city_reviews": family(
        "select count(*) from reviews join customers on customers.id = reviews.customer_id "
        "where customers.city = '{city}' and customers.age > {age}",
        """<many> reviews did {city} customers <over> {age} [write|give|post]?
        Count the reviews by customers <from> {city} [who are|that are] <over> {age}.
        Customers in {city} <over> {age}: <ask> the <number> of their reviews?
        <ask> the <number> of reviews [by|from] customers <from> {city} [aged over|<over>] {age}?
        How [often|many times] did {city} customers <over> {age} review [something|a product]?
        Reviews [from|by] {city} customers <over> {age}: how many [are there|do we have]?
        <many> reviews [come from|were written by] customers <over> {age} in {city}?""",
        """Number of reviews that people from {city} with more than {age} years wrote?
        Take the customers in {city} above {age}: how many reviews have they written?""",
        """What is the number of reviews from {city} customers of more than {age} years?
        Tell me how many reviews come from people in {city} beyond {age}.""",
    ),
}
