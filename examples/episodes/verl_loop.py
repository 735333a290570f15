"""An agent loop of verl: it asks with tokens, and returns the tokens of the episode. verl need not be installed."""

from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput


class AskTwice(AgentLoopBase):
    async def run(self, sampling_params, **row):
        prompt = await self.apply_chat_template(list(row["raw_prompt"]))
        tokens, mask = list(prompt), []
        for turn in range(2):
            if turn:
                added = await self.apply_chat_template(
                    [{"role": "user", "content": "Compute it again."}], remove_system_prompt=True
                )
                tokens += added
                mask += [0] * len(added)  # not sampled, so not trained
            answer = await self.server_manager.generate(
                request_id=uuid4().hex, prompt_ids=tokens, sampling_params=sampling_params
            )
            tokens += answer.token_ids
            mask += [1] * len(answer.token_ids)
        return AgentLoopOutput(
            prompt_ids=prompt, response_ids=tokens[len(prompt) :], response_mask=mask, num_turns=2, metrics={}
        )
