// One episode from claim to receipt with fetch: node episode.mjs http://127.0.0.1:10086
const server = process.argv[2] ?? "http://127.0.0.1:10086";

async function send(url, key, body) {
  const response = await fetch(url, {
    method: body ? "POST" : "GET",
    headers: { authorization: `Bearer ${key}`, "content-type": "application/json" },
    body: body && JSON.stringify(body),
  });
  const value = await response.json();
  if (!response.ok) throw new Error(JSON.stringify(value.error));
  return value;
}

// the server chooses the task; repeating this request with the same request_id gives the same episode
const episode = await send(`${server}/swarm/v1/episodes`, process.env.AJET_SWARM_KEY ?? "none", {
  request_id: crypto.randomUUID(),
  client_id: "node",
});
const mine = `${server}/swarm/v1/episodes/${episode.episode_id}`;

// the agent: here one call, of any of the APIs of OpenAI, Anthropic and Gemini
const reply = await send(`${episode.base_url}/chat/completions`, episode.api_key, {
  model: "policy",
  messages: [{ role: "user", content: episode.task.main_query }],
});
const answer = reply.choices[0].message.content;

// the reward
const reward = answer === episode.task.metadata.answer ? 1 : 0;
await send(`${mine}/end`, episode.end_key, { reward }); // a key that the agent never has

// what became of each token: `pending` until the step is trained
const { state, tokens } = await send(mine, episode.end_key);
console.log({ state, reward, tokens });
