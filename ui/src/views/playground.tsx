/** The playground: of text, of images, or of both, as the server has them. */

import type { CallerReport } from "../api";
import { Failure, Loading } from "../parts/basics";
import { useLoaded } from "../parts/load";
import { Store, useStore } from "../store";
import { ImagePlayground } from "./images";
import { readModels } from "./models";
import { TextPlayground } from "./text";

const MODES = ["text", "images"] as const;
const wanted = new Store<(typeof MODES)[number]>("text");

export function Playground({ caller }: { caller: CallerReport }) {
  const mode = useStore(wanted);
  const models = useLoaded(readModels, []);
  if (models.value === null) {
    if (models.error === null) return <Loading what="the models" />;
    return <Failure error={models.error} retry={models.reload} />;
  }
  const { text, images } = models.value;
  const hasBoth = text.base !== null && images.base !== null;
  const isText = images.base === null || (hasBoth && mode === "text");
  return (
    <section class="playground">
      <h1 class="hidden">Playground</h1>
      {hasBoth && (
        <div class="toolbar">
          <fieldset class="choice">
            <legend class="hidden">What is generated</legend>
            {MODES.map((one) => (
              <label key={one}>
                <input type="radio" name="mode" checked={mode === one} onChange={() => wanted.set(one)} />
                <span>{one}</span>
              </label>
            ))}
          </fieldset>
        </div>
      )}
      {isText ? (
        <TextPlayground caller={caller} models={text} />
      ) : (
        <ImagePlayground base={images.base ?? ""} models={images} mayUseBase={caller.may_use_base} />
      )}
    </section>
  );
}
