// the Vercel AI SDK, over Responses: text, stream, structured output, embeddings
import assert from "node:assert";
import { createOpenAI } from "@ai-sdk/openai";
import { embed, generateObject, generateText, streamText } from "ai";
import { z } from "zod";

const provider = createOpenAI({ baseURL: process.env.OPENAI_BASE_URL });
const prompt = "What is the capital of France?";
const { text } = await generateText({ model: provider("chat"), prompt, temperature: 0, maxOutputTokens: 60 });
assert.match(text, /Paris/);
let streamed = "";
for await (const piece of streamText({ model: provider("chat"), prompt, temperature: 0 }).textStream) streamed += piece;
assert.match(streamed, /Paris/);
const { object } = await generateObject({ model: provider("chat"), prompt, schema: z.object({ capital: z.string() }),
  temperature: 0, maxOutputTokens: 60 });
assert.equal(typeof object.capital, "string");
const { embedding } = await embed({ model: provider.textEmbeddingModel("embed"), value: "hello" });
assert.equal(embedding.length, 384);
console.log("responses: text, stream, structured output; embeddings");
