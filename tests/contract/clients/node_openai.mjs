// openai for Node: chat, stream, tools, responses, embeddings
import assert from "node:assert";
import OpenAI from "openai";

const client = new OpenAI();
const messages = [{ role: "user", content: "What is the capital of France?" }];
const plain = await client.chat.completions.create({ model: "chat", messages, temperature: 0, max_tokens: 60 });
assert.match(plain.choices[0].message.content, /Paris/);
let text = "";
for await (const chunk of await client.chat.completions.create({ model: "chat", messages, temperature: 0, stream: true })) {
  text += chunk.choices[0]?.delta?.content ?? "";
}
assert.match(text, /Paris/);
const tools = [{ type: "function", function: { name: "get_weather", parameters: { type: "object",
  properties: { city: { type: "string" } }, required: ["city"] } } }];
const called = await client.chat.completions.create({ model: "chat", messages, tools, tool_choice: "required",
  temperature: 0, max_tokens: 60 });
assert.equal(called.choices[0].message.tool_calls[0].function.name, "get_weather");
const response = await client.responses.create({ model: "chat", input: "What is the capital of France?", temperature: 0 });
assert.match(response.output_text, /Paris/);
const vector = await client.embeddings.create({ model: "embed", input: "hello" });
assert.equal(vector.data[0].embedding.length, 384);
console.log("chat, stream, tools, responses, embeddings");
