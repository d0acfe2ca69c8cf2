#!/usr/bin/env bash
# One episode from claim to receipt with curl and jq: ./episode.sh http://127.0.0.1:10086
set -euo pipefail
server=${1:-http://127.0.0.1:10086}
key="Authorization: Bearer ${AJET_SWARM_KEY:-none}"
json="Content-Type: application/json"

# the server chooses the task; repeating this request with the same request_id gives the same episode
claim=$(jq -n --arg id "$RANDOM$RANDOM" '{request_id: $id, client_id: "curl", client_name: "curl"}')
episode=$(curl -sS --fail-with-body "$server/swarm/v1/episodes" -H "$key" -H "$json" -d "$claim")
id=$(jq -r .episode_id <<< "$episode")
agents="Authorization: Bearer $(jq -r .api_key <<< "$episode")"
mine="Authorization: Bearer $(jq -r .end_key <<< "$episode")" # never give this one to the agent

# the agent: here one call, of any of the APIs of OpenAI, Anthropic and Gemini
question=$(jq -r .task.main_query <<< "$episode")
ask=$(jq -n --arg q "$question" '{model: "policy", messages: [{role: "user", content: $q}]}')
url=$(jq -r .base_url <<< "$episode")
answer=$(curl -sS --fail-with-body "$url/chat/completions" -H "$agents" -H "$json" -d "$ask" | jq -r '.choices[0].message.content')

# the reward
reward=$(jq -n --arg a "$answer" --argjson e "$episode" '{reward: (if $a == $e.task.metadata.answer then 1 else 0 end)}')
curl -sS --fail-with-body "$server/swarm/v1/episodes/$id/end" -H "$mine" -H "$json" -d "$reward" > /dev/null

# what became of each token: `pending` until the step is trained
curl -sS --fail-with-body "$server/swarm/v1/episodes/$id" -H "$mine" | jq '{state, reward, tokens}'
