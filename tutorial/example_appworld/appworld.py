"""An agent that does tasks in AppWorld by writing Python, a block a turn, until the task says that
it is complete."""

import ajet


class AppWorldAgent(ajet.Workflow):
    async def execute(
        self, workflow_task: ajet.WorkflowTask, tuner: ajet.AjetTuner
    ) -> ajet.WorkflowOutput:
        env = workflow_task.gym_env
        client = tuner.as_raw_openai_sdk_client()
        messages = list(workflow_task.task.init_messages)
        for _ in range(tuner.config.rollout.multi_turn.max_steps):
            reply = (await client.chat.completions.create(messages)).choices[0].message
            messages.append({"role": "assistant", "content": reply.content})
            observation, _, ended, _ = env.step(messages[-1])
            messages.append({"role": "user", "content": observation})
            if ended or tuner.get_context_tracker().context_overflow:
                break
        return ajet.WorkflowOutput(reward=None, log_metrics={"turns": len(messages) // 2})
